package file

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

func TestConformance(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "web.yaml", web("10.0.0.1"))
	write(t, dir, "istio.yaml", gateway)
	conf, err := json.Marshal(Config{Path: dir})
	must(t, err)

	put := func(name, text string) func(context.Context) error {
		return func(context.Context) error {
			tmp := filepath.Join(dir, "tmp")
			return errors.Join(os.WriteFile(tmp, []byte(text), 0o644), os.Rename(tmp, filepath.Join(dir, name)))
		}
	}
	reach := func(want string) func(w *plugintest.World) error {
		return func(w *plugintest.World) error {
			for _, we := range w.WorkloadEntries("conformance/web") {
				if we.Address != want {
					return fmt.Errorf("web is at %s, not %s", we.Address, want)
				}
				return nil
			}
			return errors.New("web has no endpoint")
		}
	}
	noGateway := func(w *plugintest.World) error {
		if names := w.Names("networking.istio.io/Gateway"); len(names) > 0 {
			return fmt.Errorf("there are gateways: %v", names)
		}
		return nil
	}
	const empty = "services:\n- name: joined\n  instances:\n"
	joined := empty
	gone := func(context.Context) error { return os.Rename(dir, dir+".gone") }
	back := func(context.Context) error { return os.Rename(dir+".gone", dir) }
	plugintest.Conformance(t, plugintest.Config{
		Config:  conf,
		Adapter: "file",
		Changes: []plugintest.Change{
			{
				Name: "a resource that is not there yet",
				Do:   put("entry.yaml", "apiVersion: networking.istio.io/v1\nkind: ServiceEntry\nmetadata: {name: api, namespace: shop}\nspec: {hosts: [api.example.org], ports: [{number: 80, name: http, protocol: HTTP}], resolution: DNS}\n"),
				Want: func(w *plugintest.World) error {
					if w.Resource(collection.ServiceEntry, "shop/api") == nil {
						return fmt.Errorf("shop/api is not among %v", w.Names(collection.ServiceEntry))
					}
					return nil
				},
				MaxUpserts: 1,
			},
			{
				Name: "a broken file",
				Do:   put("web.yaml", "services: 1\n"),
				Want: func(w *plugintest.World) error {
					if w.Problems["file web.yaml"] == "" {
						return fmt.Errorf("web.yaml is not among the problems %v", w.Problems)
					}
					return reach("10.0.0.1")(w)
				},
			},
			{
				Name: "the mended file",
				Do:   put("web.yaml", web("10.0.0.2")),
				Want: func(w *plugintest.World) error {
					if len(w.Problems) > 0 {
						return fmt.Errorf("there are problems: %v", w.Problems)
					}
					return reach("10.0.0.2")(w)
				},
				MaxUpserts: 2,
			},
			{
				Name: "a removed file",
				Do:   func(context.Context) error { return os.Remove(filepath.Join(dir, "istio.yaml")) },
				Want: noGateway,
			},
		},
		Outages: []plugintest.Outage{{
			Name: "a directory that is gone", Want: reach("10.0.0.2"),
			Cut: gone, Restore: back,
		}},
		Flaps: &plugintest.Flaps{
			Grace: 6 * time.Second, // more than it has, which is none
			Cut:   gone, Restore: back, Host: "joined.conformance",
			Join: func(ctx context.Context, n int) error {
				joined += fmt.Sprintf("  - {address: 10.0.0.%d, port: 80}\n", n)
				return put("joined.yaml", joined)(ctx)
			},
			Leave: func(context.Context, int) error {
				joined = empty
				return os.WriteFile(filepath.Join(dir+".gone", "joined.yaml"), []byte(joined), 0o644)
			},
		},
	})
}
