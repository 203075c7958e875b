package plugin

import (
	"encoding/binary"
	"runtime"
	"testing"

	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// The filter judges a call by its architecture, its number and its arguments,
// and allows nothing that it does not know.
func TestFilter(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("the numbers are those of amd64")
	}
	const (
		amd64, i386 = 0xc000003e, 0x40000003 // AUDIT_ARCH of linux/audit.h
		x32         = 0x40000000
		inet, unixs = unix.AF_INET, unix.AF_UNIX
		flags       = unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK
	)
	number := func(name string) uint32 {
		n, ok := arch.X86_64.SyscallNames[name]
		if !ok {
			t.Fatalf("there is no call %s", name)
		}
		return uint32(n)
	}
	some, none := Access{Ports: []uint16{8500}}, Access{}
	local := Access{UnixSockets: true}
	for _, tt := range []struct {
		name   string
		access Access
		arch   uint32
		number uint32
		args   [3]uint64
		want   bool
	}{
		{"read", none, amd64, number("read"), [3]uint64{}, true},
		{"read by its number of x32", none, amd64, x32 | number("read"), [3]uint64{}, false},
		{"read by its number of i386", none, i386, 3, [3]uint64{}, false},
		{"a call of i386 with a number that amd64 allows", none, i386, number("read"), [3]uint64{}, false},
		{"socket of i386", some, i386, 359, [3]uint64{inet, unix.SOCK_STREAM}, false},
		{"socketcall of i386", some, i386, 102, [3]uint64{1}, false},
		{"socket of x32", some, amd64, x32 | number("socket"), [3]uint64{inet, unix.SOCK_STREAM}, false},
		{"a call that does not exist", some, amd64, 9999, [3]uint64{}, false},
		{"TCP", some, amd64, number("socket"), [3]uint64{inet, unix.SOCK_STREAM | flags, 0}, true},
		{"TCP over IPv6, by its protocol", some, amd64, number("socket"), [3]uint64{unix.AF_INET6, unix.SOCK_STREAM, unix.IPPROTO_TCP}, true},
		{"UDP", some, amd64, number("socket"), [3]uint64{inet, unix.SOCK_DGRAM | flags, 0}, true},
		{"TCP without a network", none, amd64, number("socket"), [3]uint64{inet, unix.SOCK_STREAM, 0}, false},
		{"MPTCP", some, amd64, number("socket"), [3]uint64{inet, unix.SOCK_STREAM, unix.IPPROTO_MPTCP}, false},
		{"SCTP", some, amd64, number("socket"), [3]uint64{inet, unix.SOCK_STREAM, unix.IPPROTO_SCTP}, false},
		{"ping", some, amd64, number("socket"), [3]uint64{inet, unix.SOCK_DGRAM, unix.IPPROTO_ICMP}, false},
		{"raw", some, amd64, number("socket"), [3]uint64{inet, unix.SOCK_RAW, 0}, false},
		{"sequenced packets", some, amd64, number("socket"), [3]uint64{inet, unix.SOCK_SEQPACKET, 0}, false},
		{"packets", some, amd64, number("socket"), [3]uint64{unix.AF_PACKET, unix.SOCK_DGRAM, 0}, false},
		{"vsock", some, amd64, number("socket"), [3]uint64{unix.AF_VSOCK, unix.SOCK_STREAM, 0}, false},
		{"a family whose low half is that of IPv4", some, amd64, number("socket"), [3]uint64{1<<32 | inet, unix.SOCK_STREAM, 0}, false},
		{"routes", some, amd64, number("socket"), [3]uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE}, true},
		{"packet filters", some, amd64, number("socket"), [3]uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_NETFILTER}, false},
		{"Unix socket", some, amd64, number("socket"), [3]uint64{unixs, unix.SOCK_STREAM, 0}, false},
		{"Unix socket of a server", local, amd64, number("socket"), [3]uint64{unixs, unix.SOCK_STREAM, 0}, true},
		{"listen", some, amd64, number("listen"), [3]uint64{}, false},
		{"thread", none, amd64, number("clone"), [3]uint64{unix.CLONE_VM | unix.CLONE_THREAD}, true},
		{"process", none, amd64, number("clone"), [3]uint64{unix.CLONE_VM | unix.CLONE_VFORK}, false},
		{"fork", none, amd64, number("fork"), [3]uint64{}, false},
		{"execve", none, amd64, number("execve"), [3]uint64{}, false},
		{"signal to the parent", none, amd64, number("kill"), [3]uint64{1}, false},
		{"limit of the parent", none, amd64, number("prlimit64"), [3]uint64{1}, false},
		{"dumpable again", none, amd64, number("prctl"), [3]uint64{unix.PR_SET_DUMPABLE, 1}, false},
		{"input of a terminal", none, amd64, number("ioctl"), [3]uint64{0, unix.TIOCSTI}, false},
		{"chmod", some, amd64, number("chmod"), [3]uint64{}, false},
		{"chmod of a file that it writes", Access{Write: []string{"x"}}, amd64, number("chmod"), [3]uint64{}, true},
		{"io_uring", some, amd64, number("io_uring_setup"), [3]uint64{}, false},
	} {
		policy, err := filter(tt.access)
		if err != nil {
			t.Fatal(err)
		}
		program, err := policy.Assemble()
		if err != nil {
			t.Fatal(err)
		}
		vm, err := bpf.NewVM(program)
		if err != nil {
			t.Fatal(err)
		}
		// The simulator reads words in network order; the lower half of an
		// argument comes first, as in memory.
		words := []uint32{tt.number, tt.arch, 0, 0}
		for _, arg := range tt.args {
			words = append(words, uint32(arg), uint32(arg>>32))
		}
		data := make([]byte, 64)
		for i, w := range words {
			binary.BigEndian.PutUint32(data[4*i:], w)
		}
		got, err := vm.Run(data)
		if err != nil {
			t.Fatal(err)
		}
		if ok := got == unix.SECCOMP_RET_ALLOW; ok != tt.want {
			t.Errorf("%s: allowed %v (%#x), want %v", tt.name, ok, got, tt.want)
		}
	}
}
