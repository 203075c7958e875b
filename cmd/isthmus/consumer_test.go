package main

import (
	"fmt"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testkube"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

// A bridge writes what a consumer of its configuration says: after a reload
// too, and after one without the consumer the objects stay. What dump prints is
// what is written.
func TestConsumer(t *testing.T) {
	testenv.SkipIfShort(t)
	t.Parallel()
	kube := testkube.Start(t, testkube.Config{Istio: true})
	kube.Apply(t, "{apiVersion: v1, kind: Namespace, metadata: {name: load}}")
	file := filepath.Join(t.TempDir(), "isthmus.yaml")
	const registries = "listen: {xds: \"127.0.0.1:0\", admin: {address: \"127.0.0.1:0\", allow: [{peer: {cidr: 127.0.0.0/8}}]}}\nstate: {dir: \"\"}\nregistries: [{name: load, type: sim, config: {services: 3, changes_per_second: 0}}]\n"
	consumers := fmt.Sprintf("consumers: {kubernetes: [{name: ambient, kubeconfig: %q, view: {namespaces: [load]}, labels: {team: shop}}]}\n", kube.Kubeconfig)
	r := serveFile(t, file, registries)
	if _, body := get(t, r.admin+"/api/v1/consumers"); !strings.Contains(body, `"items": []`) {
		t.Errorf("without consumers there are %s", body)
	}

	r.reload(registries + consumers)
	written := func() {
		t.Helper()
		testwait.Eventually(t, testenv.Patience, "three stubs", func() (string, bool) {
			_, body := get(t, r.admin+"/metrics")
			return body, strings.Contains(body, `isthmus_consumer_objects{consumer="ambient",state="written"} 3`)
		})
	}
	written()
	const list = "/apis/networking.istio.io/v1/namespaces/load/serviceentries?labelSelector=team%3Dshop,isthmus.io/consumer%3Dambient"
	read := func() string {
		t.Helper()
		body, code, err := kube.Do(t.Context(), http.MethodGet, list, "", "", nil)
		if err != nil || code != http.StatusOK {
			t.Fatalf("status %d, %v: %s", code, err, body)
		}
		return string(body)
	}
	if n := strings.Count(read(), `.isthmus-stub","namespace":"load"`); n != 3 {
		t.Errorf("the API server has %s", read())
	}
	if _, body := get(t, r.admin+"/api/v1/consumers/ambient/objects?q=written"); strings.Count(body, `.isthmus-stub"`) != 3 {
		t.Errorf("the API lists %s", body)
	}
	_, body := get(t, r.admin+"/api/v1/consumers/ambient/objects")
	names := regexp.MustCompile(`"entry": "(load/[^"]+)"`).FindStringSubmatch(body)
	x := start(t, "explain", names[1], "--address", strings.TrimPrefix(r.admin, "http://"))
	if code, text := x.wait(), strings.Join(x.stdout.seen, "\n"); code != exitOK || !strings.Contains(text, "consumers\n  ambient: "+names[1]+".isthmus-stub: written") {
		t.Errorf("explain ended with %d and says\n%s", code, text)
	}
	if code, body := get(t, r.admin+"/api/v1/consumers/other/objects"); code != http.StatusNotFound {
		t.Errorf("another consumer: %d %s", code, body)
	}

	d := start(t, "dump", "--config", file, "--for", "kubernetes", "--output", "json")
	code := d.wait()
	lines := strings.Fields(strings.Join(d.stdout.seen, "\n"))
	if code != exitOK || len(lines) != 3 {
		t.Fatalf("dump ended with %d and printed %d lines: %q", code, len(lines), lines)
	}
	for _, line := range lines {
		_, hash, _ := strings.Cut(line, `"isthmus.io/hash":"`)
		hash, _, _ = strings.Cut(hash, `"`)
		if hash == "" || !strings.Contains(read(), hash) {
			t.Errorf("dump prints %s, which is not what is written", line)
		}
	}

	before := read()
	r.reload(registries)
	if _, body := get(t, r.admin+"/metrics"); strings.Contains(body, `isthmus_consumer_objects{`) {
		t.Error("the consumer is still there")
	}
	r.reload(registries + consumers)
	written()
	if _, body := get(t, r.admin+"/metrics"); !strings.Contains(body, `isthmus_consumer_writes_total{consumer="ambient",result="applied"} 0`) {
		t.Errorf("what is there was written again: %s", body)
	}
	after := read()
	items := func(list string) string {
		_, all, _ := strings.Cut(list, `"items":`)
		all, _, _ = strings.Cut(all, `"kind":"ServiceEntryList"`)
		return all
	}
	if items(before) != items(after) {
		t.Errorf("the objects were\n%s\nand are\n%s", before, after)
	}

	replaceFile(t, file, registries+strings.ReplaceAll(consumers, kube.Kubeconfig, "/nowhere/kubeconfig"))
	if code, a := post(t, r.admin+"/api/v1/reload", ""); code != http.StatusUnprocessableEntity || len(a.Problems) != 1 || a.Problems[0].Field != "consumers.kubernetes[0].kubeconfig" {
		t.Errorf("a reload without the kubeconfig: %d %+v", code, a)
	}

	testPrune(t, kube, r, registries, registries+consumers)
}

// What a consumer has written is removed on demand: when neither the
// configuration has it nor a bridge writes it, and only what a bridge has
// written.
func testPrune(t *testing.T, kube *testkube.Server, r *reloaded, without, with string) {
	t.Helper()
	labelled := func(name, consumer string) string {
		return fmt.Sprintf("---\n{apiVersion: networking.istio.io/v1, kind: ServiceEntry, metadata: {namespace: load, name: %s, labels: {isthmus.io/consumer: %s}}, spec: {hosts: [%[1]s.example.org], ports: [{number: 80, name: http, protocol: HTTP}], resolution: NONE}}\n", name, consumer)
	}
	kube.Apply(t, labelled("copied", "ambient")+labelled("others", "other"))
	entries := func() int {
		t.Helper()
		body, code, err := kube.Do(t.Context(), http.MethodGet, "/apis/networking.istio.io/v1/serviceentries", "", "", nil)
		if err != nil || code != http.StatusOK {
			t.Fatalf("status %d, %v: %s", code, err, body)
		}
		return strings.Count(string(body), `"kind":"ServiceEntry"`)
	}
	bare, full := filepath.Join(t.TempDir(), "bare.yaml"), filepath.Join(t.TempDir(), "full.yaml")
	replaceFile(t, bare, without)
	replaceFile(t, full, with)
	prune := func(code, left int, says string, args ...string) {
		t.Helper()
		p := start(t, append([]string{"kubernetes", "prune"}, args...)...)
		got := p.wait()
		out := strings.Join(append(p.stdout.seen, p.stderr.seen...), "\n")
		if n := entries(); got != code || n != left || !strings.Contains(out, says) {
			t.Errorf("prune %q ended with %d, %d objects are left, and it printed\n%s", args, got, n, out)
		}
	}
	to := []string{"--config", bare, "--kubeconfig", kube.Kubeconfig}
	one := append(to[:4:4], "--consumer", "ambient")
	prune(exitFailed, 5, "is in the configuration", "--config", full, "--consumer", "ambient")
	prune(exitOK, 5, "consumer other: ServiceEntry load/others, left alone", "--config", full)
	prune(exitOK, 5, "Nothing was removed.", to...)
	prune(exitFailed, 5, "holds the Lease default/isthmus-ambient and writes these objects", one...)
	prune(exitFailed, 5, "the bridge is in no pod of Kubernetes", "--config", bare)
	prune(exitOK, 5, "There are no objects", append(to[:4:4], "--consumer", "nobody")...)

	r.reload(without)
	prune(exitOK, 5, "consumer ambient: ServiceEntry load/copied, left alone: no bridge has written it", append(one[:6:6], "--dry-run")...)
	prune(exitOK, 2, "Removed 3 objects of consumer ambient.", one...)
	prune(exitOK, 2, "Removed 0 objects of consumer ambient.", one...)
	if body, code, err := kube.Do(t.Context(), http.MethodGet, "/apis/coordination.k8s.io/v1/namespaces/default/leases/isthmus-ambient", "", "", nil); err != nil || code != http.StatusNotFound {
		t.Errorf("the Lease: status %d, %v: %s", code, err, body)
	}
}
