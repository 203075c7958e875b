package e2e

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testconsul"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
)

// A Consul that came up empty, and a plugin that starts again meanwhile and
// knows nothing of what there was: every service stays, for an operator to
// decide.
func TestEmptyConsulIsHeldBack(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	consul := testconsul.Start(t, testconsul.Config{})
	all := bystanders(20)
	consul.Register(t, all...)
	isthmus := testisthmus.Start(t, follow{}.registries(consul.Addr))
	isthmus.WaitReady(t)
	before := isthmus.Endpoints(t)
	if len(before) != 20 {
		t.Fatalf("%d services are served", len(before))
	}
	// empty replaces Consul by an empty one, and the plugin by one that has not
	// seen anything else.
	empty := func() {
		t.Helper()
		plugin := isthmus.Registry(t, registryName).PID
		if err := syscall.Kill(plugin, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		consul.RestartEmpty(t)
		if err := syscall.Kill(plugin, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		isthmus.WaitPhase(t, registryName, "removal-paused")
		want := testisthmus.Protection{Pending: true, Services: 20, Of: 20, Endpoints: 60}
		if got := isthmus.Registry(t, registryName).Protection; got == nil || *got != want {
			t.Errorf("held back is %+v, want %+v", got, want)
		}
		if diff := cmp.Diff(before, isthmus.Endpoints(t)); diff != "" {
			t.Errorf("with an empty Consul, served (-before +after):\n%s", diff)
		}
	}

	empty()
	// The agents register again, one after the other.
	for i, instance := range all {
		consul.Register(t, instance)
		if i == len(all)/2 {
			testenv.Eventually(t, testenv.Patience, "half of them to be back", func() (string, bool) {
				p := isthmus.Registry(t, registryName).Protection
				return fmt.Sprintf("%+v", p), p != nil && p.Endpoints == len(all)-i-1
			})
			if diff := cmp.Diff(before, isthmus.Endpoints(t)); diff != "" {
				t.Errorf("with half of the services back, served (-before +after):\n%s", diff)
			}
		}
	}
	isthmus.WaitPhase(t, registryName, "live")
	if diff := cmp.Diff(before, isthmus.Endpoints(t)); diff != "" {
		t.Errorf("with all services back, served (-before +after):\n%s", diff)
	}

	empty()
	consul.Register(t, web(1))
	testenv.Eventually(t, testenv.Patience, "the new service, while the others are held back", func() (string, bool) {
		now := isthmus.Endpoints(t)
		return fmt.Sprint(now), len(now) == 21
	})
	if out := isthmus.Decide(t, "allow", registryName); !strings.Contains(out, "removal allowed: 20 services, 60 endpoints") {
		t.Errorf("accept printed %s", out)
	}
	if diff := cmp.Diff(map[string]int{"consul/web": 1}, isthmus.Endpoints(t)); diff != "" {
		t.Errorf("after accept, served (-want +got):\n%s", diff)
	}
	isthmus.WaitPhase(t, registryName, "live")
}

// A registry that loses its endpoints one by one, all over, is one that loses
// its services: each is served with what it had, or with most of it.
func TestEmptiedInstanceByInstance(t *testing.T) {
	testenv.SkipIfShort(t)
	const services, each, removed = 38, 3, 99
	dir, has := t.TempDir(), map[string]int{}
	write := func(s int, instances []int) {
		t.Helper()
		name := fmt.Sprintf("s%02d", s)
		text := "services: [{name: " + name + ", ports: [80], instances: ["
		for _, i := range instances {
			text += fmt.Sprintf("{address: 10.1.%d.%d}, ", s, i+1)
		}
		if err := os.WriteFile(filepath.Join(dir, "."+name), []byte(text+"]}]\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "."+name), filepath.Join(dir, name+".yaml")); err != nil {
			t.Fatal(err)
		}
		has["files/"+name] = len(instances)
	}
	left := map[int][]int{}
	var gone []int
	for s := range services {
		left[s] = []int{0, 1, 2}
		write(s, left[s])
		gone = append(gone, s, s, s)
	}
	isthmus := testisthmus.Start(t, fmt.Sprintf("- {name: files, type: file, config: {path: %q}, translate: {host: \"{{.Name}}.example.org\", namespace: files}}\n", dir))
	isthmus.WaitReady(t)
	rand.New(rand.NewPCG(30, 3)).Shuffle(len(gone), func(i, j int) { gone[i], gone[j] = gone[j], gone[i] })
	for n, s := range gone[:removed] {
		left[s] = left[s][1:]
		write(s, left[s])
		if n%9 == 8 { // what is written in between may be one step
			testenv.Eventually(t, testenv.Patience, "the bridge to have heard of it", func() (string, bool) {
				now := isthmus.Registry(t, "files").Instances
				return fmt.Sprintf("%d instances", now), now == len(gone)-n-1
			})
		}
	}
	served := func() (string, bool) {
		now := isthmus.Endpoints(t)
		for name, n := range has {
			if now[name] != each && (now[name] != n || n < 2) {
				return fmt.Sprintf("%s has %d endpoints in the registry, and is served with %d", name, n, now[name]), false
			}
		}
		p := isthmus.Registry(t, "files").Protection
		return fmt.Sprintf("protection %+v", p), p != nil && p.Pending
	}
	testenv.Eventually(t, testenv.Patience, "each service to have what it had", served)
	if out := isthmus.Decide(t, "allow", "files"); !strings.Contains(out, "removal allowed") {
		t.Errorf("allow printed %s", out)
	}
	if diff := cmp.Diff(has, isthmus.Endpoints(t)); diff != "" {
		t.Errorf("after allow, served (-registry +bridge):\n%s", diff)
	}
}

// A bridge that was killed, and comes back when its Consul came up empty
// meanwhile: what it restored stays, and half of it after half has registered
// again.
func TestRestartAgainstEmptyConsul(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	consul := testconsul.Start(t, testconsul.Config{})
	all := bystanders(20)
	consul.Register(t, all...)
	isthmus := testisthmus.Start(t, follow{}.registries(consul.Addr))
	isthmus.WaitReady(t)
	before := isthmus.Endpoints(t)
	if len(before) != 20 {
		t.Fatalf("%d services are served", len(before))
	}
	isthmus.WaitKept(t)
	isthmus.Kill9()
	consul.RestartEmpty(t)
	isthmus.Restart(t)
	isthmus.WaitPhase(t, registryName, "removal-paused")
	want := testisthmus.Protection{Pending: true, Services: 20, Of: 20, Endpoints: 60}
	if got := isthmus.Registry(t, registryName).Protection; got == nil || *got != want {
		t.Errorf("held back is %+v, want %+v", got, want)
	}
	if diff := cmp.Diff(before, isthmus.Endpoints(t)); diff != "" {
		t.Errorf("with an empty Consul, served (-before +after):\n%s", diff)
	}
	for _, instance := range all[:30] {
		consul.Register(t, instance)
	}
	testenv.Eventually(t, testenv.Patience, "half of them to be back", func() (string, bool) {
		p := isthmus.Registry(t, registryName).Protection
		return fmt.Sprintf("%+v", p), p != nil && p.Endpoints == 30
	})
	if diff := cmp.Diff(before, isthmus.Endpoints(t)); diff != "" {
		t.Errorf("with half of the services back, served (-before +after):\n%s", diff)
	}
	if out := isthmus.Decide(t, "allow", registryName); !strings.Contains(out, "removal allowed: 10 services, 30 endpoints") {
		t.Errorf("accept printed %s", out)
	}
	isthmus.WaitPhase(t, registryName, "live")
	if got := isthmus.Endpoints(t); len(got) != 10 {
		t.Errorf("after accept, served: %v", got)
	}
}
