package plugin

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"unsafe"

	"github.com/elastic/go-seccomp-bpf"
	"github.com/elastic/go-seccomp-bpf/arch"
	"github.com/landlock-lsm/go-landlock/landlock"
	landlocksys "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"
	"kernel.org/pub/linux/libs/security/libcap/psx"
)

const (
	rightsRead  = landlock.AccessFSSet(landlocksys.AccessFSReadFile | landlocksys.AccessFSReadDir)
	rightsFile  = landlock.AccessFSSet(landlocksys.AccessFSReadFile)
	rightsWrite = rightsRead | landlocksys.AccessFSWriteFile | landlocksys.AccessFSMakeReg | landlocksys.AccessFSRemoveFile | landlocksys.AccessFSTruncate | landlocksys.AccessFSRemoveDir
)

// enforce gives up all rights but those of a, on all threads and for good. It
// returns the version of Landlock that confines files and ports, 0 if the
// kernel has none, and why system calls are not confined. An error leaves the
// process unusable.
func (c *confinement) enforce(a Access) (version int, seccomp, err error) {
	version, err = landlocksys.LandlockGetABIVersion()
	if err != nil {
		version = 0 // built without it, or off
	}
	var rules []landlock.Rule
	for _, r := range c.roots {
		rights := rightsRead
		switch {
		case r.info == nil:
			continue
		case r.write:
			rights = rightsWrite
		case !r.info.IsDir():
			rights = rightsFile
		}
		rules = append(rules, landlock.PathAccess(rights, r.path).IgnoreIfMissing())
	}
	for _, p := range append(slices.Clone(a.Ports), dnsPort) {
		rules = append(rules, landlock.ConnectTCP(p))
	}
	// Newer versions also confine UDP, which the resolver needs on any port.
	config := landlock.V6
	if a.AnyPort {
		config.HandledAccessNet = landlock.AccessNetSet(landlocksys.AccessNetBindTCP)
		rules = slices.DeleteFunc(rules, func(r landlock.Rule) bool {
			_, net := r.(landlock.NetRule)
			return net
		})
	}
	if err := config.BestEffort().Restrict(rules...); err != nil {
		return 0, nil, fmt.Errorf("confine files and ports: %w", err)
	}
	if err := dropCapabilities(); err != nil {
		return 0, nil, fmt.Errorf("give up capabilities: %w", err)
	}
	return version, allowCalls(a), nil
}

// dropCapabilities gives up what root may do on all threads, but for reading
// files of other users: Landlock says which files.
func dropCapabilities() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var has [2]unix.CapUserData
	if err := unix.Capget(&header, &has[0]); err != nil {
		return err
	}
	const kept = 1<<unix.CAP_DAC_OVERRIDE | 1<<unix.CAP_DAC_READ_SEARCH
	keep := [2]unix.CapUserData{{Effective: has[0].Effective & kept, Permitted: has[0].Permitted & kept}}
	if _, _, errno := psx.Syscall3(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&keep[0])), 0); errno != 0 {
		return errno
	}
	return nil
}

// allowed are the system calls of a program that waits, computes, reads and
// writes files, and talks over sockets that it has. Landlock says which files;
// calls that depend on their arguments are in [filter]. A call is on the list
// if Go's runtime and library, a C library beside it, or the race detector
// makes it after the configuration was read. Each adapter's conformance test
// runs with the list in force.
var allowed = []string{
	// Memory.
	"brk", "madvise", "membarrier", "mincore", "mlock", "mlock2", "mmap", "mprotect", "mremap", "msync", "munlock", "munmap",
	// Threads, signals and time.
	"alarm", "arch_prctl", "clock_getres", "clock_gettime", "clock_nanosleep", "exit", "exit_group", "futex", "futex_requeue", "futex_wait", "futex_waitv", "futex_wake",
	"get_robust_list", "getcpu", "getitimer", "gettid", "gettimeofday", "nanosleep", "pause", "restart_syscall", "rseq",
	"rt_sigaction", "rt_sigpending", "rt_sigprocmask", "rt_sigreturn", "rt_sigsuspend", "rt_sigtimedwait", "sched_get_priority_max", "sched_get_priority_min", "sched_getaffinity", "sched_getparam", "sched_getscheduler", "sched_yield",
	"set_robust_list", "set_tid_address", "setitimer", "sigaltstack", "sigreturn", "time", "timer_create", "timer_delete", "timer_getoverrun", "timer_gettime", "timer_settime",
	"timerfd_create", "timerfd_gettime", "timerfd_settime", "times", "wait4", "waitid",
	// What the process is.
	"getegid", "geteuid", "getgid", "getgroups", "getpgid", "getpgrp", "getpid", "getppid", "getpriority", "getrandom", "getresgid", "getresuid", "getrlimit", "getrusage", "getsid", "getuid", "sysinfo", "ugetrlimit", "uname",
	// Descriptors and waiting for them.
	"close", "close_range", "dup", "dup2", "dup3", "epoll_create", "epoll_create1", "epoll_ctl", "epoll_pwait", "epoll_pwait2", "epoll_wait", "eventfd", "eventfd2", "fcntl", "fcntl64",
	"inotify_add_watch", "inotify_init", "inotify_init1", "inotify_rm_watch", "_newselect", "pipe", "pipe2", "poll", "ppoll", "pselect6", "select",
	// Files.
	"access", "chdir", "copy_file_range", "creat", "faccessat", "faccessat2", "fadvise64", "fadvise64_64", "fallocate", "fchdir", "fdatasync", "flock", "fstat", "fstat64", "fstatat64", "fstatfs", "fstatfs64", "fsync", "ftruncate", "ftruncate64",
	"getcwd", "getdents", "getdents64", "lseek", "_llseek", "lstat", "lstat64", "mkdir", "mkdirat", "newfstatat", "open", "openat", "openat2", "pread64", "preadv", "preadv2", "pwrite64", "pwritev", "pwritev2",
	"read", "readahead", "readlink", "readlinkat", "readv", "rename", "renameat", "renameat2", "rmdir", "sendfile", "sendfile64", "splice", "stat", "stat64", "statfs", "statfs64", "statx", "sync_file_range", "tee", "truncate", "truncate64", "umask", "unlink", "unlinkat", "write", "writev",
	// Sockets. The one that the plugin is served on listens before.
	"accept", "accept4", "bind", "connect", "getpeername", "getsockname", "getsockopt", "recv", "recvfrom", "recvmmsg", "recvmsg", "send", "sendmmsg", "sendmsg", "sendto", "setsockopt", "shutdown",
}

// errSocketCalls means that a filter cannot distinguish the calls of sockets.
var errSocketCalls = errors.New("on this architecture all calls of sockets are one")

// allowCalls installs the filter on all threads. A refused call fails with
// EPERM: an adapter reports that like any other error.
func allowCalls(a Access) error {
	policy, err := filter(a)
	if err != nil {
		return err
	}
	return seccomp.LoadFilter(seccomp.Filter{NoNewPrivs: true, Flag: seccomp.FilterFlagTSync, Policy: policy})
}

// filter returns the calls that are allowed. All others are refused: those
// whose number is unknown, and those by the numbers of another architecture,
// which a process may make as well (on amd64: int 0x80, and x32).
func filter(a Access) (seccomp.Policy, error) {
	machine, err := arch.GetInfo("")
	if err != nil {
		return seccomp.Policy{}, err
	}
	if _, ok := machine.SyscallNames["socketcall"]; ok {
		return seccomp.Policy{}, errSocketCalls
	}
	group := seccomp.SyscallGroup{Action: seccomp.ActionAllow}
	for _, name := range allowed {
		if _, ok := machine.SyscallNames[name]; ok {
			group.Names = append(group.Names, name)
		}
	}
	allow := func(name string, conditions ...seccomp.Condition) {
		group.NamesWithCondtions = append(group.NamesWithCondtions, seccomp.NameWithConditions{Name: name, Conditions: conditions})
	}
	is := func(argument uint32, value uint64) seccomp.Condition {
		return seccomp.Condition{Argument: argument, Operation: seccomp.Equal, Value: value}
	}
	// Threads, and no processes.
	allow("clone", seccomp.Condition{Argument: 0, Operation: seccomp.BitsSet, Value: unix.CLONE_THREAD})
	self := uint64(os.Getpid())
	allow("kill", is(0, self))
	allow("tgkill", is(0, self))
	// Its own limits, which it can only lower.
	allow("prlimit64", is(0, 0))
	allow("prlimit64", is(0, self))
	for _, option := range []uint64{unix.PR_SET_NAME, unix.PR_GET_NAME, unix.PR_SET_VMA} {
		allow("prctl", is(0, option))
	}
	const fionbio, fioclex, fionclex = 0x5421, 0x5451, 0x5450 // asm-generic/ioctls.h
	for _, request := range []uint64{unix.TCGETS, unix.TIOCGWINSZ, unix.TIOCINQ, fionbio, fioclex, fionclex} {
		allow("ioctl", is(1, request))
	}
	if len(a.Write) > 0 {
		for _, name := range []string{"chmod", "fchmod", "fchmodat", "fchmodat2"} {
			if _, ok := machine.SyscallNames[name]; ok {
				group.Names = append(group.Names, name)
			}
		}
	}
	if a.network() {
		// By protocol, as Landlock knows TCP and no other stream: neither MPTCP
		// nor SCTP. The lowest four bits of the second argument are the type;
		// flags are above.
		for _, family := range []uint64{unix.AF_INET, unix.AF_INET6} {
			for _, s := range []struct{ kind, protocol uint64 }{
				{unix.SOCK_STREAM, 0},
				{unix.SOCK_STREAM, unix.IPPROTO_TCP},
				{unix.SOCK_DGRAM, 0},
				{unix.SOCK_DGRAM, unix.IPPROTO_UDP},
			} {
				allow(
					"socket", is(0, family), is(2, s.protocol),
					seccomp.Condition{Argument: 1, Operation: seccomp.BitsSet, Value: s.kind},
					seccomp.Condition{Argument: 1, Operation: seccomp.BitsNotSet, Value: 0xf &^ s.kind},
				)
			}
		}
		// The zone of an IPv6 resolver has a number.
		allow("socket", is(0, unix.AF_NETLINK), is(2, unix.NETLINK_ROUTE))
		if a.UnixSockets {
			allow("socket", is(0, unix.AF_UNIX))
		}
	}
	policy := seccomp.Policy{DefaultAction: seccomp.ActionErrno, Syscalls: []seccomp.SyscallGroup{group}}
	if _, ok := machine.SyscallNames["clone3"]; ok {
		// Its flags are in memory. C libraries use clone where it is missing.
		missing := seccomp.SyscallGroup{Action: seccomp.ActionErrno | seccomp.Action(unix.ENOSYS), Names: []string{"clone3"}}
		policy.Syscalls = append(policy.Syscalls, missing)
	}
	return policy, nil
}
