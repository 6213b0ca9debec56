# SPDX-License-Identifier: Apache-2.0
# A guest of 512 bytes, for a host that is emulated itself, where no kernel boots in time: the firmware starts it from its disk, and
# lends it its driver. From 1 MiB on it writes blocks of 32 KiB, each another and none of which can be compressed, reads all of them
# again, and says so on its serial line:
#
#     .   64 blocks written        w   all of them        v   all are as they were written        x   one is not        e   an error
.intel_syntax noprefix
.code16
.globl _start
_start:
    xor     ax, ax
    mov     ds, ax
    mov     ss, ax
    mov     sp, 0x7c00
    mov     drive, dl
    cld
    # The noise of a block (xorshift).
    mov     ax, 0x1000
    mov     es, ax
    xor     di, di
    mov     eax, 0x9e3779b9
    mov     cx, 8192
noise:
    mov     ebx, eax
    shl     ebx, 13
    xor     eax, ebx
    mov     ebx, eax
    shr     ebx, 17
    xor     eax, ebx
    mov     ebx, eax
    shl     ebx, 5
    xor     eax, ebx
    stosd
    loop    noise

    xor     ebp, ebp
write:
    mov     word ptr packet + 6, 0x1000
    mov     ax, 0x4300
    call    disk
    inc     ebp
    test    bp, 63
    jnz     next
    mov     al, '.'
    call    say
next:
    cmp     ebp, blocks
    jb      write
    mov     al, 'w'
    call    say

    xor     ebp, ebp
verify:
    mov     word ptr packet + 6, 0x2000
    mov     ax, 0x4200
    call    disk
    push    ds
    mov     ax, 0x1000
    mov     es, ax
    mov     ax, 0x2000
    mov     ds, ax
    xor     si, si
    xor     di, di
    mov     cx, 8192
    repe cmpsd
    pop     ds
    mov     al, 'x'
    jne     end
    inc     ebp
    cmp     ebp, blocks
    jb      verify
    mov     al, 'v'
end:
    call    say
halt:
    hlt
    jmp     halt

# Give each sector of the noise the number of its block, and carry out ah for that block.
disk:
    push    ax
    mov     ax, 0x1000
    mov     es, ax
    xor     di, di
stamp:
    mov     es:[di], ebp
    add     di, 512
    cmp     di, 0x8000
    jne     stamp
    mov     eax, ebp
    shl     eax, 6
    add     eax, 2048
    mov     dword ptr packet + 8, eax
    pop     ax
    mov     dl, drive
    mov     si, offset packet
    int     0x13
    mov     al, 'e'
    jc      end
    ret

say:
    mov     dx, 0x3f8
    out     dx, al
    ret

drive:
    .byte   0
packet:
    .byte   16, 0
    .word   64, 0, 0x1000
    .long   0, 0
    .org    504
blocks:
    .long   0
    .org    510
    .word   0xaa55
