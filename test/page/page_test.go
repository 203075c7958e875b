package page

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	cdplog "github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/isthmus-mesh/isthmus/internal/testenv"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testbrowser"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testisthmus"
	"github.com/isthmus-mesh/isthmus/internal/testenv/testkube"
	"github.com/isthmus-mesh/isthmus/internal/testwait"
)

var pictures = flag.String("pictures", "", "write pictures of the pages to this `DIR`")

// patience bounds each wait; it is only used up by a failure.
const patience = 2 * time.Minute

// browser is a running Chromium.
type browser struct {
	t   *testing.T
	ctx context.Context
	axe string
}

// startBrowser starts Chromium, for as long as the test runs.
func startBrowser(t *testing.T, more ...chromedp.ExecAllocatorOption) *browser {
	t.Helper()
	chromium, axe := testbrowser.Tool.Binary(t), testbrowser.AxeTool.Binary(t)
	script, err := os.ReadFile(axe)
	if err != nil {
		t.Fatal(err)
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(chromium), chromedp.NoSandbox, chromedp.UserDataDir(t.TempDir()), chromedp.WSURLReadTimeout(patience),
		chromedp.Flag("disable-gpu", true), chromedp.Flag("hide-scrollbars", true))
	options = append(options, more...)
	allocator, end := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, endBrowser := chromedp.NewContext(allocator)
	t.Cleanup(func() {
		endBrowser()
		end() // waits for the process
	})
	if err := chromedp.Do(ctx, chromedp.Navigate("about:blank")); err != nil {
		t.Fatalf("start Chromium: %v", err)
	}
	return &browser{t, ctx, string(script)}
}

// tab is one page that is looked at.
type tab struct {
	*browser
	t    *testing.T
	base string

	mu sync.Mutex
	// guarded by mu
	wrong []string // errors of the page, and requests to other hosts
}

// open opens a tab of a width for a bridge.
func (b *browser) open(t *testing.T, admin string, width int64, dark bool) *tab {
	t.Helper()
	ctx, end := chromedp.NewContext(b.ctx)
	t.Cleanup(end)
	p := &tab{browser: &browser{t, ctx, b.axe}, t: t, base: "http://" + admin}
	if err := chromedp.Listen(ctx, func(event any) {
		p.mu.Lock()
		defer p.mu.Unlock()
		switch e := event.(type) {
		case *runtime.EventExceptionThrown:
			p.wrong = append(p.wrong, "exception: "+e.ExceptionDetails.Text)
		case *cdplog.EventEntryAdded:
			if e.Entry.Level == cdplog.EntryLevelError {
				p.wrong = append(p.wrong, "error: "+e.Entry.Text+" "+e.Entry.URL)
			}
		case *network.EventRequestWillBeSent:
			if u := e.Request.URL; !strings.HasPrefix(u, p.base+"/") && !strings.HasPrefix(u, "data:") && u != "about:blank" {
				p.wrong = append(p.wrong, "request to another host: "+u)
			}
		}
	}); err != nil {
		t.Fatal(err)
	}
	scheme := "light"
	if dark {
		scheme = "dark"
	}
	p.run(chromedp.EmulateViewport(width, 900), chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
		_, network := cdp.Call(ctx, target, network.Enable, network.EnableParams{})
		_, log := cdp.Call(ctx, target, cdplog.Enable, cdp.Empty{})
		_, media := cdp.Call(ctx, target, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
			Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
		})
		return errors.Join(network, log, media)
	}))
	return p
}

func (p *tab) run(actions ...chromedp.Action[chromedp.Void]) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	if err := chromedp.Do(ctx, actions...); err != nil {
		p.t.Fatal(err)
	}
}

func (p *tab) visit(path string) {
	p.t.Helper()
	p.run(chromedp.Navigate(p.base+path), chromedp.WaitReady(chromedp.CSS("main")))
}

// js evaluates an expression.
func js[T any](p *tab, expression string) T {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, patience)
	defer cancel()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		p.t.Fatalf("%s: %v", expression[:min(len(expression), 200)], err)
	}
	return v
}

// until waits until an expression is true.
func (p *tab) until(what, expression string) {
	p.t.Helper()
	testwait.Eventually(p.t, patience, what, func() (string, bool) {
		ctx, cancel := context.WithTimeout(p.ctx, patience)
		defer cancel()
		// An error is that of a document that is being replaced by another.
		text, err := chromedp.Run(ctx, chromedp.Evaluate[string](`(document.getElementById("main")?.innerText ?? "").slice(0, 2000)`))
		ok := false
		if err == nil {
			ok, err = chromedp.Run(ctx, chromedp.Evaluate[bool](`document.readyState === "complete" && !!(`+expression+`)`))
		}
		return fmt.Sprint(text, err), ok && err == nil
	})
}

// check fails the test if the page shown is not usable by everyone, is wider
// than the window, or had an error; picture is the name of its picture.
func (p *tab) check(picture string) {
	p.t.Helper()
	if *pictures != "" && picture != "" {
		ctx, cancel := context.WithTimeout(p.ctx, patience)
		defer cancel()
		shot, err := chromedp.Run(ctx, chromedp.CaptureScreenshot())
		if err != nil {
			p.t.Fatal(err)
		}
		writePicture(p.t, filepath.Join(*pictures, picture+".png"), shot)
	}
	if wide := js[int](p, `document.documentElement.scrollWidth - window.innerWidth`); wide > 0 {
		p.t.Errorf("%s: the page is %d pixels wider than the window", picture, wide)
	}
	js[bool](p, p.axe+"; true")
	found := js[[]struct {
		ID, Impact string
		Nodes      []struct{ HTML, FailureSummary string }
	}](p, `axe.run(document, {resultTypes: ["violations"]}).then((r) => r.violations)`)
	for _, v := range found {
		text := fmt.Sprintf("%s: axe: %s (%s) at %d places: %s %s", picture, v.ID, v.Impact, len(v.Nodes), v.Nodes[0].HTML, v.Nodes[0].FailureSummary)
		if v.Impact == "serious" || v.Impact == "critical" {
			p.t.Error(text)
		} else {
			p.t.Log(text)
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, w := range p.wrong {
		p.t.Errorf("%s: %s", picture, w)
	}
	p.wrong = nil
}

// writePicture writes a picture with its 256 most frequent colors, for which
// a fifth of the bytes will do.
func writePicture(t *testing.T, path string, shot []byte) {
	t.Helper()
	full, err := png.Decode(bytes.NewReader(shot))
	if err != nil {
		t.Fatal(err)
	}
	count := make(map[color.Color]int)
	for y := range full.Bounds().Dy() {
		for x := range full.Bounds().Dx() {
			count[full.At(x, y)]++
		}
	}
	colors := slices.SortedFunc(maps.Keys(count), func(a, b color.Color) int { return count[b] - count[a] })
	small := image.NewPaletted(full.Bounds(), colors[:min(len(colors), 256)])
	draw.Draw(small, small.Rect, full, full.Bounds().Min, draw.Src)
	var b bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&b, small); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil { //nolint:gosec // a picture for docs
		t.Fatal(err)
	}
}

// follow connects a sink to the bridge until the test ends.
func follow(t *testing.T, xds string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cmd := exec.CommandContext(ctx, testisthmus.Binary(t), "watch", "--address", xds, "--protocol", "delta")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		_ = cmd.Wait() // it was killed
	})
}

// writeServices replaces the content of a directory that the adapter file
// follows by n services.
func writeServices(t *testing.T, dir string, n int) {
	t.Helper()
	var b strings.Builder
	b.WriteString("services:\n")
	for i := range n {
		fmt.Fprintf(&b, "- {name: pay%02d, instances: [{id: pay%02d-1, address: 10.7.0.%d, port: 80}]}\n", i, i, i+1)
	}
	part := filepath.Join(dir, "part")
	if err := os.WriteFile(part, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(part, filepath.Join(dir, "services.yaml")); err != nil {
		t.Fatal(err)
	}
}

// staticRegistry is a registry of n services named shop000.
func staticRegistry(name string, n int) string {
	var b strings.Builder
	fmt.Fprintf(&b, "- name: %s\n  type: static\n  translate: {host: \"{{.Name}}.example.org\"}\n  config:\n    services:\n", name)
	for i := range n {
		fmt.Fprintf(&b, "    - {name: shop%03d, ports: [{number: 8080, name: http}], endpoints: [{id: a, address: 10.8.%d.%d}, {id: b, address: 10.9.%d.%d, disabled: true}]}\n", i, i/250, i%250+1, i/250, i%250+1)
	}
	return b.String()
}

func await(t *testing.T, admin, path string, patterns ...string) {
	t.Helper()
	testwait.Eventually(t, patience, fmt.Sprintf("%s to have %q", path, patterns), func() (string, bool) {
		resp, err := http.Get("http://" + admin + path)
		if err != nil {
			return err.Error(), false
		}
		defer resp.Body.Close()
		var raw json.RawMessage
		err = json.NewDecoder(resp.Body).Decode(&raw)
		for _, p := range patterns {
			if !strings.Contains(string(raw), p) {
				return string(raw[:min(len(raw), 2000)]), false
			}
		}
		return "", err == nil
	})
}

// TestPages goes through the pages as people do, in each state that a bridge
// can be in.
func TestPages(t *testing.T) {
	testenv.SkipIfShort(t)
	b := startBrowser(t)

	t.Run("no services", func(t *testing.T) {
		i := testisthmus.Start(t, "- {name: files, type: file, config: {path: \""+t.TempDir()+"\"}}\n")
		await(t, i.Admin, "/api/v1/status", `"not_ready": []`)
		p := b.open(t, i.Admin, 1280, false)
		p.visit("/")
		p.check("empty-overview")
		for _, path := range []string{"/registries", "/services", "/sinks", "/changes", "/problems", "/host/web.example.org"} {
			p.visit(path)
			p.check("")
		}
		if text := js[string](p, `document.querySelector(".summary").innerText`); !strings.Contains(text, "No registry has web.example.org") {
			t.Errorf("the page of a host that nobody has says %q", text)
		}
	})

	t.Run("50 services", func(t *testing.T) {
		i := testisthmus.Start(t, "- {name: consul-eu, type: sim, config: {services: 50, instances: 3, changes_per_second: 5}}\n")
		await(t, i.Admin, "/api/v1/status", `"not_ready": []`)
		follow(t, i.XDS)
		await(t, i.Admin, "/api/v1/sinks", `"acked_at"`)
		p := b.open(t, i.Admin, 1280, false)

		// The keyboard alone: the first key leads past the navigation, and a
		// sink opens with Enter and stays open when the page is brought up to
		// date.
		p.visit("/sinks")
		p.run(chromedp.KeyEvent(kb.Tab))
		if text := js[string](p, `document.activeElement.innerText`); text != "Skip to the content" {
			t.Errorf("the first key leads to %q", text)
		}
		js[bool](p, `document.querySelector("main details summary").focus(), true`)
		p.run(chromedp.KeyEvent(kb.Enter))
		p.until("the sink to be open", `document.querySelector("main details").open`)
		js[string](p, `document.querySelector("main h1").textContent = "old"`)
		p.until("the page to be brought up to date", `document.querySelector("main h1").textContent === "Sinks"`)
		if !js[bool](p, `document.querySelector("main details").open && document.activeElement.tagName === "SUMMARY"`) {
			t.Error("the sink is closed, or has lost the focus, since the page was brought up to date")
		}
		p.check("sinks")

		// New changes appear on their own, with the address.
		p.visit("/changes")
		rows := `document.querySelectorAll("#changes tr").length`
		first := `document.querySelector("#changes tr time").dateTime`
		before := js[string](p, first)
		p.until("a change to appear", `document.getElementById("live").textContent === "Live." && `+first+` > "`+before+`"`)
		if js[int](p, rows) == 0 || !strings.Contains(js[string](p, `document.getElementById("changes").innerText`), "10.") {
			t.Error("the changes have no address")
		}
		p.check("changes")

		// Changes that are sorted stay so as others come.
		js[bool](p, `document.querySelector("table.changes thead th:nth-child(4) button").click(), true`)
		newest := `[...document.querySelectorAll("#changes time")].map((t) => t.dateTime).sort().at(-1)`
		before = js[string](p, newest)
		p.until("another change", newest+` > "`+before+`"`)
		if !js[bool](p, `[...document.querySelectorAll("#changes tr")].map((r) => r.cells[3].innerText).every((n, i, all) => i === 0 || all[i - 1].localeCompare(n, "en", {numeric: true}) <= 0)`) {
			t.Error("the changes are not sorted by name")
		}

		for _, dark := range []bool{false, true} {
			p := b.open(t, i.Admin, 1280, dark)
			p.visit("/")
			p.until("the charts", `document.querySelectorAll("polyline").length === 3`)
			p.check(map[bool]string{false: "overview", true: "overview-dark"}[dark])
			if background := js[string](p, `getComputedStyle(document.body).backgroundColor`); (background == "rgb(255, 255, 255)") == dark {
				t.Errorf("dark: %t, and the background is %s", dark, background)
			}
		}
	})

	t.Run("consumers", func(t *testing.T) {
		kube := testkube.Start(t, testkube.Config{Istio: true})
		kube.Apply(t, "{apiVersion: v1, kind: Namespace, metadata: {name: load}}")
		i := testisthmus.Start(t, fmt.Sprintf(`- {name: load, type: sim, config: {services: 150, instances: 3, changes_per_second: 0}}
- {name: prod, type: static, config: {services: [{name: web, ports: [{number: 80}], endpoints: [10.0.0.1]}, {name: names, ports: [{number: 80}], endpoints: [a.example.org]}]}, translate: {namespace: prod}}
consumers: {kubernetes: [{name: ambient, kubeconfig: %q, writes_per_second: 1000}, {name: away, kubeconfig: %q, view: {registries: [load]}}]}
`, kube.Kubeconfig, kube.KubeconfigOf(t, map[string]any{"token": "of nobody"})))
		await(t, i.Admin, "/api/v1/consumers", `"written": 150`, `"refused": 1`, `"without": 1`, "Unauthorized")
		await(t, i.Admin, "/api/v1/conditions", "objects-not-written")
		text := func(p *tab) string { return js[string](p, `document.getElementById("main").innerText`) }
		for _, dark := range []bool{false, true} {
			p := b.open(t, i.Admin, 1280, dark)
			p.visit("/consumers")
			for _, want := range []string{"1 object is not written", `namespaces "prod" not found`, "150 written", "nothing can be written", "Unauthorized"} {
				if !strings.Contains(text(p), want) {
					t.Errorf("the page of consumers lacks %q: %s", want, text(p))
				}
			}
			js[bool](p, `document.querySelectorAll("dd code").forEach((c) => { c.textContent = c.textContent.replace(/^.*[/]/, "/etc/isthmus/") }), true`)
			p.check(map[bool]string{false: "consumers"}[dark])
		}
		p := b.open(t, i.Admin, 500, false)
		p.visit("/consumers")
		p.check("")
		p.visit("/consumers/ambient?show=refused")
		if all := text(p); !strings.Contains(all, "prod/web.isthmus-stub") || strings.Contains(all, "load/") {
			t.Errorf("the objects that are refused are %s", all)
		}
		p.check("")
		p.visit("/consumers/ambient")
		js[bool](p, `document.querySelector("a[rel=next]").click(), true`)
		p.until("the next page", `location.search.startsWith("?after=") && document.querySelector("p[role=status]").innerText === "152 objects, 52 of them here"`)
		p.check("")
		p.visit("/host/web")
		if all := text(p); !strings.Contains(all, `Consumer ambient cannot write prod/web.isthmus-stub (refused): namespaces "prod" not found.`) {
			t.Errorf("the page of a host says %s", all)
		}
		p.check("")
		p.visit("/")
		p.check("")
	})

	t.Run("5,000 services", func(t *testing.T) {
		dir := t.TempDir()
		writeServices(t, dir, 20)
		i := testisthmus.Start(t, "- {name: consul-eu, type: sim, config: {services: 5000, instances: 3, changes_per_second: 20}}\n"+
			staticRegistry("prod", 200)+staticRegistry("old", 200)+
			"- {name: files, type: file, config: {path: \""+dir+"\"}}\n"+
			"- {name: consul-us, type: consul, required: false, config: {address: \"http://127.0.0.1:1\"}}\n")
		await(t, i.Admin, "/api/v1/status", `"not_ready": []`)
		writeServices(t, dir, 2)
		await(t, i.Admin, "/api/v1/registries", `"protection"`, "connection refused")
		await(t, i.Admin, "/api/v1/conditions", "removal-paused", "serves-without")
		p := b.open(t, i.Admin, 1280, false)
		p.visit("/")
		p.check("trouble-overview")
		// Columns sort by number, and stay so when the page is brought up to
		// date.
		js[bool](p, `document.querySelector("table.registries thead th:nth-child(3) button").click(), true`)
		names := `[...document.querySelectorAll("table.registries tbody th")].map((c) => c.innerText).join(" ")`
		for _, when := range []string{"sorted", "brought up to date"} {
			if got := js[string](p, names); got != "consul-us files prod old consul-eu" {
				t.Errorf("registries by services, %s: %s", when, got)
			}
			js[string](p, `document.querySelector("main h1").textContent = "old"`)
			p.until("the page to be brought up to date", `document.querySelector("main h1").textContent === "Overview"`)
		}
		p.check("")
		p.visit("/registries")
		p.check("registries")

		p.visit("/services")
		js[bool](p, `document.getElementById("q").focus(), true`)
		p.run(chromedp.KeyEvent("shop01" + kb.Enter))
		p.until("what was searched for", `document.querySelector("p[role=status]")?.innerText.startsWith("20 services")`)
		p.check("services")
		p.visit("/services?q=10.8.0.19")
		if text := js[string](p, `document.querySelector("p[role=status]").innerText`); !strings.HasPrefix(text, "1 service") {
			t.Errorf("the address of an endpoint finds %s", text)
		}
		p.visit("/services?q=10.8.0.")
		p.until("the services of the addresses", `document.querySelector("p[role=status]").innerText.startsWith("200 services")`)
		p.visit("/services")
		js[bool](p, `document.querySelector("a[rel=next]").click(), true`)
		p.until("the next page", `location.search.startsWith("?after=")`)
		p.check("")

		// What 200 names have in common is one row that opens.
		p.visit("/problems")
		if n := js[int](p, `[...document.querySelectorAll("main details > summary strong")].filter((s) => s.innerText === "200 names owned by prod").length`); n != 1 {
			t.Errorf("%d rows say that 200 names are owned by prod: %s", n, js[string](p, `document.getElementById("main").innerText.slice(0, 1000)`))
		}
		p.check("problems")

		p.visit("/host/shop007.example.org")
		text := js[string](p, `document.querySelector(".summary").innerText`)
		for _, want := range []string{"Instance b is disabled in the registry: left out; enable it there (maintenance).", "Registry old is not served for this host"} {
			if !strings.Contains(text, want) {
				t.Errorf("the page of a host lacks %q: %s", want, text)
			}
		}
		p.check("host")

		narrow := b.open(t, i.Admin, 360, true)
		for path, picture := range map[string]string{"/": "narrow-overview", "/registries": "", "/services": "narrow-services", "/sinks": "", "/changes": "narrow-changes", "/problems": "", "/host/shop007.example.org": "narrow-host"} {
			narrow.visit(path)
			narrow.check(picture)
		}
	})
}
