package hostile

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"google.golang.org/grpc/credentials/insecure"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
)

// within is set where a test runs in a network of its own.
const within = "ISTHMUS_TEST_NETWORK"

// private runs the test once more, in a network of its own with a /64 of IPv6,
// and reports whether it did. Only root can: for others there is no IPv6.
func private(t *testing.T, name string) bool {
	t.Helper()
	if os.Getenv(within) != "" || os.Geteuid() != 0 {
		return false
	}
	testisthmus.Binary(t)
	self, err := os.Executable()
	must(t, err)
	cmd := exec.CommandContext(t.Context(), "unshare", "--net", "--fork", "--kill-child", "sh", "-ec", `
ip link set lo up
for i in $(seq 32); do ip -6 addr add $(printf 2001:db8::%x $i)/64 dev lo nodad; done
exec "$@"`, "sh", self, "-test.run=^"+name+"$", "-test.v", "-long="+long.String(), "-attack="+*only)
	cmd.Env = append(os.Environ(), within+"=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	must(t, cmd.Run())
	return true
}

// container is the memory of the bridge and its plugins, as the chart has it.
const container = 1 << 30

// TestHostileAll shows that a bridge with as much memory as a container has by
// default survives all attacks at once, each from an address of its own, and
// that a good sink gets every change meanwhile.
func TestHostileAll(t *testing.T) {
	if private(t, "TestHostileAll") {
		return
	}
	group, env := testenv.NewCgroup(t, container), []string(nil)
	if group == nil {
		t.Log("no memory cgroup can be made, so that GOMEMLIMIT stands for it")
		env = []string{"GOMEMLIMIT=1GiB"}
	}
	b := startBridge(t, group, env...)
	plain, secure := b.sink(t, b.XDS, insecure.NewCredentials()), b.sink(t, b.TLS, b.secured(t))
	lasts := 2 * shortly
	b.Scale = 0.1
	if *long > 0 {
		lasts, b.Scale = 3**long, 1
	}
	quiet := b.measure(t, lasts/3, plain, secure)
	b.resetMemory()
	var stops []func() float64
	for i, a := range attacks {
		if a.name == "network" && b.XDS6 == "" {
			continue
		}
		b.From = fmt.Sprint("127.0.2.", 1+i)
		stops = append(stops, b.attack(t, a))
	}
	took := b.measure(t, lasts, plain, secure)
	used := 0.0
	for _, stop := range stops {
		used += stop()
	}
	b.running(t)
	memory := b.memory(t)
	if memory > container {
		t.Errorf("the bridge took %d MB", memory/1e6)
	}
	t.Logf("%d attacks at once, %.2f processors: %d changes, p50 %.1f ms, p99 %.1f ms (quiet %.1f ms); the bridge took %d MB", len(stops), used,
		len(took), ms(percentile(took, 50)), ms(percentile(took, 99)), ms(percentile(quiet, 99)), memory/1e6)
	if group != nil {
		peak := strings.TrimSpace(string(read(t, group.Peak)))
		t.Logf("the most of the cgroup, plugins and page cache included: %s bytes", peak)
	}
	b.sink(t, b.XDS, insecure.NewCredentials()).await(t, b.change(t))
	b.running(t)
}
