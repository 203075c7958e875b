package supervisor_test

import (
	"syscall"
	"unsafe"
)

// foreign makes a system call of i386, as any process of amd64 may.
func foreign(number, a, b, c uintptr) (uintptr, syscall.Errno) {
	code, err := syscall.Mmap(-1, 0, 4096, syscall.PROT_READ|syscall.PROT_WRITE|syscall.PROT_EXEC, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		return 0, syscall.EINVAL
	}
	defer syscall.Munmap(code) //nolint:errcheck // the process is a test's
	// Go passes the arguments in RAX, RBX, RCX and RDI; the call takes EAX,
	// EBX, ECX and EDX: mov edx, edi; int 0x80; ret.
	copy(code, []byte{0x89, 0xfa, 0xcd, 0x80, 0xc3})
	entry := unsafe.Pointer(&code[0])
	closure := &entry
	call := *(*func(number, a, b, c uintptr) uintptr)(unsafe.Pointer(&closure))
	if r := int32(call(number, a, b, c)); r < 0 {
		return 0, syscall.Errno(-r)
	} else { //nolint:revive // as a descriptor
		return uintptr(r), 0
	}
}
