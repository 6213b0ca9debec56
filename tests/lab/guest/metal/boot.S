// SPDX-License-Identifier: Apache-2.0
// First sector of a bootable disk: has the BIOS read PARTS times 16 KiB after it to 64 KiB, moves them to 1 MiB and enters them there.
.code16
.globl _start
_start: cli
        xorw %ax, %ax
        movw %ax, %ds
        movw %ax, %ss
        movw $0x7C00, %sp
        ljmp $0, $begin
begin:  sti
        movw $PARTS, %cx
read:   pushw %cx
        movw $packet, %si
        movb $0x42, %ah
        int $0x13                      // dl: the disk, as the BIOS has left it
        popw %cx
        jc failed
        addw $0x400, packet + 6        // 16 KiB further, in memory
        addl $32, packet + 8           // and on the disk
        loop read
        cli
        lgdt table
        movl $1, %eax
        movl %eax, %cr0
        ljmp $8, $move
failed: hlt
        jmp failed
.code32
move:   movw $0x10, %ax
        movw %ax, %ds
        movw %ax, %es
        movl $0x10000, %esi
        movl $0x100000, %edi
        movl $PARTS * 4096, %ecx
        cld
        rep movsl
        movl $0x100000, %eax
        jmp *%eax
.balign 4
packet: .byte 16, 0
        .word 32, 0, 0x1000            // sectors at once; offset and segment
        .quad 1                        // the first of them
.balign 8
descriptors:
        .quad 0, 0x00CF9A000000FFFF, 0x00CF92000000FFFF
table:  .word table - descriptors - 1
        .long descriptors
.org 510
        .word 0xAA55
