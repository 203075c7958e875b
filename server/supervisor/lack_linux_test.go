package supervisor_test

import (
	"github.com/elastic/go-seccomp-bpf"
	"golang.org/x/sys/unix"
)

// lack makes a system call fail as on a kernel that does not have it.
func lack(call string) {
	err := seccomp.LoadFilter(seccomp.Filter{NoNewPrivs: true, Flag: seccomp.FilterFlagTSync, Policy: seccomp.Policy{
		DefaultAction: seccomp.ActionAllow,
		Syscalls:      []seccomp.SyscallGroup{{Names: []string{call}, Action: seccomp.ActionErrno | seccomp.Action(unix.ENOSYS)}},
	}})
	if err != nil {
		panic(err)
	}
}
