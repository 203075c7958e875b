package plugin

import (
	"fmt"
	"slices"

	"github.com/elastic/go-seccomp-bpf"
	"github.com/elastic/go-seccomp-bpf/arch"
	"github.com/landlock-lsm/go-landlock/landlock"
	landlocksys "github.com/landlock-lsm/go-landlock/landlock/syscall"
	"golang.org/x/sys/unix"
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
	return version, refuseCalls(a), nil
}

// refused are system calls that no adapter needs: those that start programs,
// reach into other processes, change the system, or have a history of giving
// root to whoever exploits them. A list of what is allowed would be shorter to
// argue for, but each version of Go's runtime could break it.
var refused = []string{
	"execve", "execveat",
	"ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_open", "pidfd_getfd", "pidfd_send_signal", "kcmp",
	"mount", "umount2", "pivot_root", "chroot", "setns", "unshare", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr",
	"bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register",
	"add_key", "request_key", "keyctl",
	"init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot",
	"swapon", "swapoff", "acct", "quotactl", "syslog", "iopl", "ioperm", "modify_ldt", "personality", "lookup_dcookie", "nfsservctl", "vhangup",
	"name_to_handle_at", "open_by_handle_at", "fanotify_init", "mknod", "mknodat",
	"settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname", "setdomainname",
	"setuid", "setgid", "setreuid", "setregid", "setresuid", "setresgid", "setgroups", "setfsuid", "setfsgid", "capset",
	"listen", "socketpair",
}

// refuseCalls installs the filter on all threads. A refused call fails with
// EPERM: an adapter reports that like any other error.
func refuseCalls(a Access) error {
	machine, err := arch.GetInfo("")
	if err != nil {
		return err
	}
	group := seccomp.SyscallGroup{Action: seccomp.ActionErrno}
	for _, name := range refused {
		if _, ok := machine.SyscallNames[name]; ok {
			group.Names = append(group.Names, name)
		}
	}
	if !a.network() {
		group.Names = append(group.Names, "socket")
	} else {
		families := []uint64{unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK}
		if a.UnixSockets {
			families = append(families, unix.AF_UNIX)
		}
		var others seccomp.ArgumentConditions
		for _, f := range families {
			others = append(others, seccomp.Condition{Argument: 0, Operation: seccomp.NotEqual, Value: f})
		}
		// Landlock does not know MPTCP.
		multipath := seccomp.ArgumentConditions{{Argument: 2, Operation: seccomp.Equal, Value: unix.IPPROTO_MPTCP}}
		// Packets of any kind, which root may send. Type 3 has both bits, and
		// the flags in the argument none of them; netlink sockets have it too.
		raw := seccomp.ArgumentConditions{
			{Argument: 0, Operation: seccomp.NotEqual, Value: unix.AF_NETLINK},
			{Argument: 1, Operation: seccomp.BitsSet, Value: unix.SOCK_RAW & unix.SOCK_STREAM},
			{Argument: 1, Operation: seccomp.BitsSet, Value: unix.SOCK_RAW & unix.SOCK_DGRAM},
		}
		for _, conditions := range []seccomp.ArgumentConditions{others, multipath, raw} {
			group.NamesWithCondtions = append(group.NamesWithCondtions, seccomp.NameWithConditions{Name: "socket", Conditions: conditions})
		}
	}
	return seccomp.LoadFilter(seccomp.Filter{
		NoNewPrivs: true,
		Flag:       seccomp.FilterFlagTSync,
		Policy:     seccomp.Policy{DefaultAction: seccomp.ActionAllow, Syscalls: []seccomp.SyscallGroup{group}},
	})
}
