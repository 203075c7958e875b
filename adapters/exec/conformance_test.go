package exec

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// followerProgram is a program that stays: it prints what a file holds, again
// whenever that changes, and ends where there is no file.
const followerProgram = `#!/usr/bin/env python3
import json, sys, time
was = None
while True:
    with open(sys.argv[1]) as f:
        now = json.load(f)
    if now != was:
        print(json.dumps({"services": now}), flush=True)
    was = now
    time.sleep(0.05)
`

// The adapter keeps the contract with a program that stays and with one that is
// started again and again, and what is known stays while they fail.
func TestConformance(t *testing.T) {
	t.Parallel()
	for name, config := range map[string]func(program, file string) map[string]any{
		"stays": func(program, file string) map[string]any {
			return map[string]any{"command": []string{program, file}}
		},
		"interval": func(_, file string) map[string]any {
			return map[string]any{"command": []string{"sed", `s/.*/{"services": &}/`, file}, "interval": "100ms"}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			file := filepath.Join(t.TempDir(), "state.json")
			several, joined := 2, []int(nil)
			write := func(web int) func(context.Context) error {
				return func(context.Context) error {
					several = web
					services := []map[string]any{{"name": "api", "instances": []any{map[string]any{"address": "192.0.2.100", "port": 9000}}}, {"name": "web"}}
					instances := []any{}
					for i := range web {
						instances = append(instances, map[string]any{"id": fmt.Sprint(i), "address": fmt.Sprintf("192.0.2.%d", i+1), "port": 8080})
					}
					for _, i := range joined {
						instances = append(instances, map[string]any{"id": fmt.Sprint(i), "address": fmt.Sprintf("192.0.2.%d", i), "port": 8080})
					}
					services[1]["instances"] = instances
					b, err := json.Marshal(services)
					if err != nil {
						return err
					}
					if err := os.WriteFile(file+".new", b, 0o600); err != nil {
						return err
					}
					return os.Rename(file+".new", file)
				}
			}
			if err := write(2)(t.Context()); err != nil {
				t.Fatal(err)
			}
			c := config(script(t, followerProgram), file)
			c["env"] = map[string]string{"PATH": os.Getenv("PATH")}
			raw, err := json.Marshal(c)
			if err != nil {
				t.Fatal(err)
			}
			c["remove_grace"] = "6s"
			flapping, err := json.Marshal(c)
			if err != nil {
				t.Fatal(err)
			}
			endpoints := func(want int) func(*plugintest.World) error {
				return func(w *plugintest.World) error {
					if n := len(w.WorkloadEntries("conformance/web")); n != want {
						return fmt.Errorf("web has %d instances, want %d", n, want)
					}
					starts, _ := w.Metric("program_starts_total")
					lines, _ := w.Metric("program_lines_total")
					if bad, ok := w.Metric("program_bad_lines_total"); !ok || bad != 0 || starts < 1 || lines < 1 {
						return fmt.Errorf("%v starts, %v lines, %v bad ones", starts, lines, bad)
					}
					return nil
				}
			}
			plugintest.Conformance(t, plugintest.Config{
				Config: raw, Adapter: "exec", Within: patience,
				Changes: []plugintest.Change{
					{Name: "an instance more", Do: write(3), Want: endpoints(3), MaxUpserts: 1},
					{Name: "one less", Do: write(1), Want: endpoints(1)},
				},
				Outages: []plugintest.Outage{{
					Name: "the program fails",
					Cut:  func(context.Context) error { return os.Remove(file) },
					// As the changes above left it.
					Restore: write(1),
				}},
				Flaps: &plugintest.Flaps{
					Config: flapping, Grace: 6 * time.Second,
					Cut:     func(context.Context) error { return os.Remove(file) },
					Restore: func(ctx context.Context) error { return write(several)(ctx) },
					Host:    "web.conformance",
					Join: func(ctx context.Context, n int) error {
						joined = append(joined, n)
						return write(several)(ctx)
					},
					Leave: func(context.Context, int) error { joined = nil; return nil },
				},
			})
		})
	}
}
