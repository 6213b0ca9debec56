// SPDX-License-Identifier: Apache-2.0
// Where QEMU (-kernel: PVH) and boot.S enter, in protected mode of 32 bits: zeroes what has no content, maps 4 GiB one to one, goes on
// in 64 bits.
.code32
.section .start, "ax"
.globl start
start:  cli
        cld
        lgdt table
        ljmp $0x18, $begin
begin:  movw $0x10, %ax
        movw %ax, %ds
        movw %ax, %es
        movw %ax, %ss
        movl $stack_top, %esp
        movl $bss_start, %edi
        movl $bss_end, %ecx
        subl %edi, %ecx
        shrl $2, %ecx
        xorl %eax, %eax
        rep stosl
        movl $pdpt + 3, pml4           // one table of four directories, each of 512 pages of 2 MiB
        movl $pd, %edi
        movl $0x83, %eax
        movl $2048, %ecx
page:   movl %eax, (%edi)
        addl $0x200000, %eax
        addl $8, %edi
        loop page
        movl $pd + 3, pdpt
        movl $pd + 0x1003, pdpt + 8
        movl $pd + 0x2003, pdpt + 16
        movl $pd + 0x3003, pdpt + 24
        movl $0x20, %eax               // PAE
        movl %eax, %cr4
        movl $pml4, %eax
        movl %eax, %cr3
        movl $0xC0000080, %ecx         // EFER: long mode
        rdmsr
        orl $0x100, %eax
        wrmsr
        movl %cr0, %eax
        orl $0x80000001, %eax
        movl %eax, %cr0
        ljmp $0x08, $long
.code64
long:   xorl %ebp, %ebp
        call kernel
.balign 8
descriptors:
        .quad 0, 0x00AF9A000000FFFF, 0x00CF92000000FFFF, 0x00CF9A000000FFFF
table:  .word table - descriptors - 1
        .long descriptors
.section .note.pvh, "a", @note
        .balign 4
        .long 4, 4, 18                 // XEN_ELFNOTE_PHYS32_ENTRY
        .asciz "Xen"
        .long start
.section .bss
.balign 4096
pml4:   .skip 4096
pdpt:   .skip 4096
pd:     .skip 16384
stack:  .skip 65536
stack_top:
.section .note.GNU-stack, "", @progbits
