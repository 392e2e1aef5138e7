// nolinks runs a command as on a file system without hard links and without renames that keep an existing
// file: `nolinks COMMAND [ARGUMENT]…`. A filter of system calls refuses linkat, and renameat2 with flags.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"unsafe"
)

// The kernel's struct sock_filter.
type instruction struct {
	code   uint16
	jt, jf uint8
	k      uint32
}

// The kernel's struct sock_fprog.
type program struct {
	length uint16
	first  *instruction
}

const (
	load      = 0x20
	jumpEqual = 0x15
	ret       = 0x06

	offsetFlags = 16 + 4*8 // the fifth argument
	allow       = 0x7fff0000
	refuse      = 0x00050000

	setNoNewPrivs = 38
	setSeccomp    = 22
	filterMode    = 2
)

var renameat2 = map[string]uint32{"amd64": 316, "arm64": 276}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "nolinks:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("usage: nolinks COMMAND [ARGUMENT]…")
	}
	path, err := exec.LookPath(args[0])
	if err != nil {
		return err
	}
	call, known := renameat2[runtime.GOARCH]
	if !known {
		return fmt.Errorf("the number of renameat2 on %s is not known", runtime.GOARCH)
	}
	code := []instruction{
		{load, 0, 0, 0},
		{jumpEqual, 0, 1, syscall.SYS_LINKAT},
		{ret, 0, 0, refuse | uint32(syscall.EPERM)},
		{jumpEqual, 0, 3, call},
		{load, 0, 0, offsetFlags},
		{jumpEqual, 1, 0, 0},
		{ret, 0, 0, refuse | uint32(syscall.EINVAL)},
		{ret, 0, 0, allow},
	}
	filter := program{uint16(len(code)), &code[0]}
	// The filter is that of this thread, which becomes the command.
	runtime.LockOSThread()
	if _, _, e := syscall.RawSyscall6(syscall.SYS_PRCTL, setNoNewPrivs, 1, 0, 0, 0, 0); e != 0 {
		return e
	}
	at := uintptr(unsafe.Pointer(&filter))
	if _, _, e := syscall.RawSyscall6(syscall.SYS_PRCTL, setSeccomp, filterMode, at, 0, 0, 0); e != 0 {
		return e
	}
	return syscall.Exec(path, args, os.Environ())
}
