package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// container is what a container has by default, see deploy.
const container = 1 << 30

// TestContainer starts the bridge without any limits in its file where there
// is 1 GiB, and has one registry list 250,000 services of 2 kB, far more than
// fits. It is refused what is beyond its limit, with a line; the bridge and the
// plugins live, and what another registry has is served.
//
// As root it is a memory cgroup that the kernel bounds. A user cannot make one:
// then GOMEMLIMIT says how much there is, and the processes' own peaks are
// compared with it.
func TestContainer(t *testing.T) {
	if testing.Short() || testwait.Raced() {
		t.Skip("it takes a minute and 1 GiB, many times that with the race detector")
	}
	for _, adapter := range []string{brokenAdapter, hostileAdapter} {
		t.Run(adapter, func(t *testing.T) {
			path, err := exec.LookPath(adapter)
			if err != nil {
				t.Fatal(err)
			}
			dir := t.TempDir()
			file := filepath.Join(dir, "isthmus.yaml")
			if err := os.WriteFile(file, []byte(fmt.Sprintf(`
listen: {xds: 127.0.0.1:0, admin: 127.0.0.1:0}
state: {dir: %s}
plugin_dir: %s
registries:
- {name: flood, type: %s, config: {do: large, count: %d}}
- {name: small, type: sim, config: {services: 7, changes_per_second: 0}}
`, dir, filepath.Dir(path), strings.TrimPrefix(adapter, "isthmus-adapter-"), floodLarge)), 0o600); err != nil {
				t.Fatal(err)
			}
			g := testenv.NewCgroup(t, container)
			b := &flooded{t: t}
			if b.log, err = os.Create(filepath.Join(dir, "log")); err != nil {
				t.Fatal(err)
			}
			b.cmd = g.Command("isthmus", "serve", "--config", file)
			if g == nil {
				t.Log("no memory cgroup can be made, so that GOMEMLIMIT stands for it")
				b.cmd.Env = append(os.Environ(), "GOMEMLIMIT=1GiB")
			}
			b.cmd.Stdout, b.cmd.Stderr = b.log, b.log
			if err := b.cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				_ = b.cmd.Process.Signal(syscall.SIGTERM)
				if err := b.cmd.Wait(); err != nil {
					t.Errorf("the bridge ended with %v", err)
				}
				_ = b.log.Close()
			}()
			b.find(`msg="limits follow from the available memory" memory=1073741824 from=\S+ .*limits.plugin_memory=268435456`)
			b.admin = b.find(`msg=serving xds=\S+ admin=(\S+)`)[1]
			b.find(`msg="listing complete" registry=flood`)
			b.find(`msg="listing complete" registry=small`)
			b.await("/api/v1/registries", `limits\.(bytes|services|resources)_per_registry \(\d+\)`)
			if line := `msg="the registry has reached a limit; what is beyond it is rejected" registry=flood limit=limits.`; adapter == hostileAdapter && strings.Count(b.text(), line) != 1 {
				t.Errorf("%d lines %s", strings.Count(b.text(), line), line)
			}
			_, body := get(t, "http://"+b.admin+"/api/v1/registries")
			var all struct {
				Items []struct {
					Name, Phase                     string
					PID, Restarts, Resources, Bytes int
					Count                           int `json:"problem_count"`
				}
			}
			if err := json.Unmarshal([]byte(body), &all); err != nil {
				t.Fatal(err)
			}
			bridge := peak(t, b.cmd.Process.Pid)
			sum := bridge
			for _, r := range all.Items {
				most := peak(t, r.PID)
				sum += most
				t.Logf("%s: plugin %d MB; %d resources of %d bytes, %d problems", r.Name, most, r.Resources, r.Bytes, r.Count)
				if r.Phase != "live" || r.Restarts != 0 {
					t.Errorf("%s is %s after %d restarts", r.Name, r.Phase, r.Restarts)
				}
			}
			t.Logf("bridge %d MB, all together %d MB", bridge, sum)
			if g != nil {
				used, err := os.ReadFile(g.Peak)
				t.Logf("peak of the cgroup, page cache included: %s %v", bytes.TrimSpace(used), err)
			} else if sum > container/1_000_000 {
				t.Errorf("all processes together took %d MB", sum)
			}
			for query, want := range map[string]string{"registry=small": `"total": 7`, "registry=flood&q=live": `"total": 1`} {
				if _, body := get(t, "http://"+b.admin+"/api/v1/services?"+query); !strings.Contains(body, want) {
					t.Errorf("%s: %.2000s", query, body)
				}
			}
			if _, body := get(t, "http://"+b.admin+"/api/v1/status"); !strings.Contains(body, `"memory": 1073741824`) || !strings.Contains(body, `"plugin_memory": 268435456`) {
				t.Errorf("the limits in force are not shown: %s", body)
			}
		})
	}
}
