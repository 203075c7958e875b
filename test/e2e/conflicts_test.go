package e2e

import (
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testistiod"
)

// sinkTypes are what the sink of conflicts follows: by delta, instances are
// resources of their own.
var sinkTypes = map[bool][]string{
	false: {"networking.istio.io/v1/ServiceEntry"},
	true:  {"networking.istio.io/v1/ServiceEntry", "networking.istio.io/v1/WorkloadEntry"},
}

// meshView is what a sink has, by type URL and name.
type meshView map[string]map[string]*mcp.Resource

// String has a line for each ServiceEntry, with its endpoints, whether they are
// part of it or selected in its namespace.
func (v meshView) String() string {
	var lines []string
	text := func(we *networking.WorkloadEntry) string {
		s := fmt.Sprintf("%s:%d", we.GetAddress(), we.GetPorts()["http"])
		if w := we.GetWeight(); w > 0 {
			s += fmt.Sprintf("*%d", w)
		}
		return s
	}
	for name, res := range v[sinkTypes[true][0]] {
		var se networking.ServiceEntry
		if err := proto.Unmarshal(res.GetBody().GetValue(), &se); err != nil {
			return err.Error()
		}
		var endpoints []string
		for _, ep := range se.GetEndpoints() {
			endpoints = append(endpoints, text(ep))
		}
		for other, res := range v[sinkTypes[true][1]] {
			var we networking.WorkloadEntry
			if err := proto.Unmarshal(res.GetBody().GetValue(), &we); err != nil {
				return err.Error()
			}
			selected := se.GetWorkloadSelector() != nil && path.Dir(other) == path.Dir(name)
			for key, value := range se.GetWorkloadSelector().GetLabels() {
				selected = selected && we.GetLabels()[key] == value
			}
			if selected {
				endpoints = append(endpoints, text(&we))
			}
		}
		slices.Sort(endpoints)
		lines = append(lines, strings.Join(append([]string{name, strings.Join(se.GetHosts(), ",")}, endpoints...), " "))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

func (v meshView) set(t *testing.T, url string, body *anypb.Any) {
	t.Helper()
	res := new(mcp.Resource)
	if err := body.UnmarshalTo(res); err != nil {
		t.Fatal(err)
	}
	v[url][res.GetMetadata().GetName()] = res
}

// waitSink follows a bridge as a sink, by delta or SotW, until it has what is
// wanted.
func waitSink(t *testing.T, bridge *testisthmus.Server, delta bool, want string) {
	t.Helper()
	conn, err := grpc.NewClient(bridge.XDS, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	have := meshView{}
	client := discovery.NewAggregatedDiscoveryServiceClient(conn)
	var ask func(url, nonce, version string) error
	var take func() (url, nonce, version string, err error)
	if delta {
		stream, err := client.DeltaAggregatedResources(ctx)
		if err != nil {
			t.Fatal(err)
		}
		ask = func(url, nonce, _ string) error {
			return stream.Send(&discovery.DeltaDiscoveryRequest{TypeUrl: url, ResponseNonce: nonce})
		}
		take = func() (string, string, string, error) {
			r, err := stream.Recv()
			for _, res := range r.GetResources() {
				have.set(t, r.GetTypeUrl(), res.GetResource())
			}
			for _, name := range r.GetRemovedResources() {
				delete(have[r.GetTypeUrl()], name)
			}
			return r.GetTypeUrl(), r.GetNonce(), "", err
		}
	} else {
		stream, err := client.StreamAggregatedResources(ctx)
		if err != nil {
			t.Fatal(err)
		}
		ask = func(url, nonce, version string) error {
			return stream.Send(&discovery.DiscoveryRequest{TypeUrl: url, ResponseNonce: nonce, VersionInfo: version})
		}
		take = func() (string, string, string, error) {
			r, err := stream.Recv()
			clear(have[r.GetTypeUrl()])
			for _, res := range r.GetResources() {
				have.set(t, r.GetTypeUrl(), res)
			}
			return r.GetTypeUrl(), r.GetNonce(), r.GetVersionInfo(), err
		}
	}
	for _, url := range sinkTypes[delta] {
		have[url] = map[string]*mcp.Resource{}
		if err := ask(url, "", ""); err != nil {
			t.Fatal(err)
		}
	}
	want = strings.Join(strings.FieldsFunc(want, func(r rune) bool { return r == '\n' || r == '\t' }), "\n")
	for have.String() != want {
		url, nonce, version, err := take()
		if err == nil {
			err = ask(url, nonce, version)
		}
		if err != nil {
			t.Fatalf("delta %t: %v; the sink has\n%s\nwant\n%s", delta, err, have, want)
		}
	}
}

// One host in two registries is served as the rules say, to sinks of both
// protocols, from the registries' files on; when the first one has it no
// longer, the other one takes over.
func TestOneHostInTwoRegistries(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	const web = `
services:
- name: web
  ports: [{name: http, number: 80, protocol: http}]
  instances:
`
	const oldWeb, newWeb = "  - {address: 10.1.0.1, port: 8080}\n", "  - {address: 10.2.0.1, port: 9090}\n  - {address: 10.2.0.2, port: 9090}\n"
	for _, tt := range []struct {
		rule                   string
		both, without, outcome string
	}{
		{
			"[]", `
			old/web web.example.org 10.1.0.1:8080`, `
			new/web web.example.org 10.2.0.1:9090 10.2.0.2:9090`, `"shadowed_by": "old"`,
		},
		{
			`[{hosts: ["*.example.org"], policy: isolate}]`, `
			new/web web.example.org 10.2.0.1:9090 10.2.0.2:9090
			old/web web.example.org 10.1.0.1:8080`, `
			new/web web.example.org 10.2.0.1:9090 10.2.0.2:9090`, `"beside": "old"`,
		},
		{
			`[{hosts: ["*.example.org"], policy: merge}]`, `
			old/web web.example.org 10.1.0.1:8080 10.2.0.1:9090 10.2.0.2:9090`, `
			new/web web.example.org 10.2.0.1:9090 10.2.0.2:9090`, `"merged_with": ["old"]`,
		},
		{
			`[{hosts: ["*.example.org"], policy: merge, weights: {old: 3, new: 1}}]`, `
			old/web web.example.org 10.1.0.1:8080*201326592 10.2.0.1:9090*33554432 10.2.0.2:9090*33554432`, `
			new/web web.example.org 10.2.0.1:9090 10.2.0.2:9090`, `"merged_with": ["old"]`,
		},
	} {
		t.Run(tt.rule, func(t *testing.T) {
			dir := t.TempDir()
			write := func(registry, instances string) {
				t.Helper()
				folder := filepath.Join(dir, registry)
				if err := os.MkdirAll(folder, 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(folder, ".web"), []byte(web+instances), 0o600); err != nil {
					t.Fatal(err)
				}
				if err := os.Rename(filepath.Join(folder, ".web"), filepath.Join(folder, "web.yaml")); err != nil {
					t.Fatal(err)
				}
			}
			write("old", oldWeb)
			write("new", newWeb)
			registries := "conflicts: " + tt.rule + "\n"
			for _, name := range []string{"new", "old"} {
				registries = fmt.Sprintf("- {name: %s, type: file, config: {path: %q}, translate: {host: \"{{.Name}}.example.org\"}}\n", name, filepath.Join(dir, name)) + registries
			}
			bridge := testisthmus.Start(t, registries)
			bridge.WaitReady(t)
			for _, delta := range []bool{false, true} {
				waitSink(t, bridge, delta, tt.both)
			}
			if services := strings.Join(strings.Fields(string(bridge.Page(t, "/api/v1/services?registry=new"))), " "); !strings.Contains(strings.ReplaceAll(services, " ", ""), strings.ReplaceAll(tt.outcome, " ", "")) {
				t.Errorf("services of the second registry: %s, want %s", services, tt.outcome)
			}
			if page := string(bridge.Page(t, "/problems")); !strings.Contains(page, "Hosts that several services have: 1") {
				t.Errorf("the page does not show the conflict: %s", page)
			}
			if n := bridge.Metrics(t)["isthmus_conflicts"]; n == nil {
				t.Error("no metric isthmus_conflicts")
			}
			if err := os.Remove(filepath.Join(dir, "old", "web.yaml")); err != nil {
				t.Fatal(err)
			}
			for _, delta := range []bool{false, true} {
				waitSink(t, bridge, delta, tt.without)
			}
			write("old", oldWeb)
			for _, delta := range []bool{false, true} {
				waitSink(t, bridge, delta, tt.both)
			}
		})
	}
}

// Two services of one registry with one host are not mixed in istiod, unless a
// rule says so: the first by name is served, and the other one is named with
// the cure by explain, doctor, the page and the list of problems.
func TestOneHostInOneRegistry(t *testing.T) {
	testenv.SkipIfShort(t)
	const host = "db.example.org"
	const registries = `- {name: static, type: static, config: {services: [
    {name: db, endpoints: [10.1.0.1:5432]}, {name: db-prod, endpoints: [10.2.0.1:5432]}]}, translate: {host: db.example.org}}
`
	bridge := testisthmus.Start(t, registries)
	istiod := testistiod.StartAs(t, testistiod.Options{Version: testistiod.Newest, Mesh: meshOf(bridge)})
	istiod.WaitReady(t)
	waits := func(want ...string) {
		t.Helper()
		testenv.Eventually(t, testenv.Patience, fmt.Sprint(want, " in istiod"), func() (string, bool) {
			got := istiod.EndpointShards(t)[host]
			return fmt.Sprint(got), slices.Equal(got, want)
		})
	}
	waits("10.1.0.1:5432")
	says(t, bridge.Doctor(t, "--address", bridge.Admin), "conflict-within", "static/db-prod is shadowed")
	for path, want := range map[string]string{
		"/api/v1/explain?host=" + host: "static/db-prod of registry static is not served",
		"/problems":                    "Hosts that several services have: 1",
		"/services":                    "shadowed by static/db",
	} {
		if page := string(bridge.Page(t, path)); !strings.Contains(page, want) {
			t.Errorf("%s does not say %q: %s", path, want, page)
		}
	}
	bridge.Configure(t, registries+`conflicts: [{hosts: ["*"], registry: static, policy: merge}]`)
	waits("10.1.0.1:5432", "10.2.0.1:5432")
}
