package admin

import (
	"bytes"
	"cmp"
	"embed"
	"encoding/json"
	"fmt"
	"html/template"
	"io/fs"
	"log/slog"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/isthmus-mesh/isthmus/server/conditions"
	"github.com/isthmus-mesh/isthmus/server/kubernetes"
	"github.com/isthmus-mesh/isthmus/server/state/history"
	"github.com/isthmus-mesh/isthmus/server/state/status"
	"github.com/isthmus-mesh/isthmus/server/stream"
	"github.com/isthmus-mesh/isthmus/server/supervisor"
)

//go:embed web
var web embed.FS

// templates are the pages by name.
var templates = func() map[string]*template.Template {
	layout := template.Must(template.New("layout").Funcs(template.FuncMap{
		"ago": ago, "thousands": thousands, "plural": plural, "bytes": size[int], "bytes64": size[int64], "types": types, "kind": kindOf, "anchor": anchor,
		"first": first[stream.Status], "firstConflicts": first[status.Conflict], "firstInstances": firstInstances, "moreInstances": moreInstances,
		"join": func(list []string) string { return strings.Join(list, ", ") },
		"at": func(now time.Time, r Registry) any {
			return struct {
				Now      time.Time
				Registry Registry
			}{now, r}
		},
		"conditionsAt": func(now time.Time, l []conditions.Condition) any {
			return struct {
				Now  time.Time
				List []conditions.Condition
			}{now, l}
		},
		"listAt": func(now time.Time, l []stream.SubscriptionStatus) any {
			return struct {
				Now  time.Time
				List []stream.SubscriptionStatus
			}{now, l}
		},
		"worst": worst, "hosts": countHosts, "severityClass": severityClass, "short": short,
		"phaseClass": phaseClass, "current": isCurrent, "sinkState": sinkState, "sinkName": sinkName, "change": changeText, "health": healthText, "pretty": pretty, "objectClass": objectClass,
	}).ParseFS(web, "web/layout.html"))
	out := make(map[string]*template.Template)
	names, _ := fs.Glob(web, "web/*.html") // the pattern is valid
	for _, name := range names {
		page := strings.TrimSuffix(strings.TrimPrefix(name, "web/"), ".html")
		if page != "layout" {
			out[page] = template.Must(template.Must(layout.Clone()).ParseFS(web, name))
		}
	}
	return out
}()

// pageData is the data of the pages' templates.
type pageData struct {
	Overview
	Now   time.Time
	Title string
	Root  string // relative path of the overview
	Live  string // "poll" if the page brings itself up to date, else "none" or "stream"
	Pages []navigation
	Query url.Values

	ServiceCount, EndpointCount, LiveRegistries, CurrentSinks, ProblemCount, SkippedCount int
	Unwritten                                                                             int // objects that consumers cannot write

	Rate   string
	Charts []chart
	Latest []history.Event

	Services list[status.Service]
	Shows    []option
	Filtered bool
	First    string // URLs of pages of a list
	NextPage string
	Stream   string

	Explanation *Explanation
	SinkRows    []sinkRow
	Consumer    *Consumer
	Objects     list[kubernetes.Object]
	Problems    []problemGroup
	Skipped     []problemGroup
}

type navigation struct {
	Path, Title string
	Count       int
}

type option struct{ Value, Text string }

// sinkRow is a sink with its collections, those apart that are empty and up to
// date.
type sinkRow struct {
	stream.Status
	Held          int
	AckedAt       time.Time
	Filled, Empty []stream.SubscriptionStatus
}

// pages adds the pages to the mux.
func (s *Server) pages(mux *http.ServeMux) {
	for name, kind := range map[string]string{"style.css": "text/css; charset=utf-8", "app.js": "text/javascript; charset=utf-8", "icon.svg": "image/svg+xml"} {
		text, err := web.ReadFile("web/" + name)
		if err != nil {
			panic(fmt.Sprintf("BUG: admin: %v", err))
		}
		mux.HandleFunc("GET /"+name, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", kind)
			_, _ = w.Write(text)
		})
	}
	mux.HandleFunc("GET /{$}", s.page("overview", "Overview", s.overviewPage))
	mux.HandleFunc("GET /registries", s.page("registries", "Registries", nil))
	mux.HandleFunc("GET /services", s.page("services", "Services", s.servicesPage))
	mux.HandleFunc("GET /host/{host...}", s.page("host", "Host", s.hostPage))
	mux.HandleFunc("GET /sinks", s.page("sinks", "Sinks", s.sinksPage))
	mux.HandleFunc("GET /consumers", s.page("consumers", "Consumers", nil))
	mux.HandleFunc("GET /consumers/{consumer}", s.page("objects", "Consumers", s.objectsPage))
	mux.HandleFunc("GET /changes", s.page("changes", "Changes", s.changesPage))
	mux.HandleFunc("GET /changes/stream", s.streamChanges)
	mux.HandleFunc("GET /problems", s.page("problems", "Problems", s.problemsPage))
}

// page returns the handler of a page. fill completes the data; an error is
// shown to the client.
func (s *Server) page(name, title string, fill func(d *pageData, r *http.Request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		d := &pageData{Overview: s.source.Overview(), Now: time.Now(), Title: title, Live: "poll", Query: r.URL.Query()}
		d.Root = strings.Repeat("../", strings.Count(r.URL.EscapedPath(), "/")-1)
		d.count()
		d.Pages = []navigation{{".", "Overview", len(d.Conditions)}, {"registries", "Registries", 0}, {"services", "Services", 0}, {"sinks", "Sinks", 0}, {"consumers", "Consumers", d.Unwritten}, {"changes", "Changes", 0}, {"problems", "Problems", d.ProblemCount}}
		if len(d.Consumers) == 0 {
			d.Pages = slices.DeleteFunc(d.Pages, func(n navigation) bool { return n.Path == "consumers" })
		}
		if fill != nil {
			if err := fill(d, r); err != nil {
				writeText(w, http.StatusBadRequest, err.Error()+"\n")
				return
			}
		}
		var b bytes.Buffer
		if err := templates[name].ExecuteTemplate(&b, "layout", d); err != nil {
			s.log.Error("render the admin page", slog.Any("err", err))
			writeText(w, http.StatusInternalServerError, "the page could not be rendered; the log says why\n")
			return
		}
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = w.Write(b.Bytes())
	}
}

// count sums up the registries and sinks.
func (d *pageData) count() {
	for i := range d.Registries {
		r := &d.Registries[i]
		d.ProblemCount += r.ProblemCount
		d.SkippedCount += r.SkippedCount
		if r.Phase == supervisor.PhaseLive {
			d.LiveRegistries++
		}
	}
	for i := range d.Sinks {
		if isCurrent(d.Sinks[i]) {
			d.CurrentSinks++
		}
	}
	for i := range d.Consumers {
		d.Unwritten += d.Consumers[i].refused()
	}
}

// overviewLatest is the number of changes on the overview.
const overviewLatest = 8

func (s *Server) overviewPage(d *pageData, _ *http.Request) error {
	for c := range s.source.Changes() {
		if d.Latest = append(d.Latest, c); len(d.Latest) == overviewLatest {
			break
		}
	}
	samples := s.source.Samples()
	d.Charts, d.Rate = charts(samples)
	if len(samples) > 0 {
		last := samples[len(samples)-1]
		d.ServiceCount, d.EndpointCount = last.Services, last.Endpoints
	}
	return nil
}

// current is the state of a collection of which the sink has acknowledged
// everything.
const current = "current"

// pageLimit is the number of rows of a list on a page.
const pageLimit = 100

var serviceShows = []option{{"", "all"}, {"served", "served"}, {"empty", "without endpoints"}, {"shadowed", "shadowed"}, {"shared", "in several registries"}}

func (s *Server) servicesPage(d *pageData, r *http.Request) error {
	q := query{registry: d.Query.Get("registry"), text: strings.ToLower(strings.TrimSpace(d.Query.Get("q"))), after: d.Query.Get("after"), limit: pageLimit}
	show := d.Query.Get("show")
	d.Live, d.Shows, d.Filtered = "none", serviceShows, q.text != "" || q.registry != "" || show != ""
	order := d.Query.Get("sort")
	key, ok := serviceOrders[strings.TrimPrefix(order, "-")]
	if !ok {
		return fmt.Errorf("sort=%q: must be host, registry, name, endpoints or state, with - before it for the other direction", order)
	}
	found := s.finder(q.text)
	d.Services = page(s.source.Services(), q, func(v status.Service) bool {
		shared := v.ShadowedBy != "" || v.Beside != "" || len(v.MergedWith) > 0
		switch {
		case show == "served" && v.ShadowedBy != "", show == "empty" && v.Endpoints > 0, (show == "shadowed" || show == "kept") && v.ShadowedBy == "", show == "shared" && !shared:
			return false
		}
		return either(q.registry, v.Registry) && found(v)
	}, func(v status.Service) string {
		k := key(&v) + "\x00" + v.Name + " " + v.Registry
		if strings.HasPrefix(order, "-") {
			return reversed(k)
		}
		return k
	})
	d.First, d.NextPage = d.turn(r, ""), d.turn(r, d.Services.Next)
	return nil
}

// serviceOrders are the keys by which services are sorted.
var serviceOrders = map[string]func(v *status.Service) string{
	"":          func(*status.Service) string { return "" },
	"host":      func(v *status.Service) string { return strings.Join(v.Hosts, " ") },
	"registry":  func(v *status.Service) string { return v.Registry },
	"name":      func(*status.Service) string { return "" },
	"endpoints": func(v *status.Service) string { return fmt.Sprintf("%010d", v.Endpoints) },
	"state": func(v *status.Service) string {
		return fmt.Sprint(v.ShadowedBy == "", v.Endpoints > 0, v.ShadowedBy)
	},
}

// reversed returns a key that sorts the other way.
func reversed(key string) string {
	b := []byte(key)
	for i := range b {
		b[i] = ^b[i]
	}
	return string(b) + "\xff"
}

// Sort returns the heading of a column that sorts the list.
func (d *pageData) Sort(by, title string) template.HTML {
	now, state, next := d.Query.Get("sort"), "", by
	switch now {
	case by:
		state, next = ` aria-sort="ascending"`, "-"+by
	case "-" + by:
		state = ` aria-sort="descending"`
	}
	values := make(url.Values)
	for _, k := range []string{"q", "registry", "show"} {
		if v := d.Query.Get(k); v != "" {
			values.Set(k, v)
		}
	}
	values.Set("sort", next)
	class := ""
	if by == "endpoints" {
		class = ` class="number"`
	}
	return template.HTML(fmt.Sprintf(`<th scope="col"%s%s><a href="services?%s">%s</a></th>`, class, state, template.HTMLEscapeString(values.Encode()), template.HTMLEscapeString(title))) //nolint:gosec // escaped
}

// turn returns the relative URL of another page of a list.
func (d *pageData) turn(r *http.Request, after string) string {
	values := make(url.Values)
	for _, k := range []string{"q", "registry", "show", "sort"} {
		if v := d.Query.Get(k); v != "" {
			values.Set(k, v)
		}
	}
	if after != "" {
		values.Set("after", after)
	}
	path := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]
	if len(values) == 0 {
		return path
	}
	return path + "?" + values.Encode()
}

func (s *Server) hostPage(d *pageData, r *http.Request) error {
	host := r.PathValue("host")
	if host == "" || len(host) > maxHostQuery {
		return fmt.Errorf("name a host of at most %d bytes: /host/web.example.org", maxHostQuery)
	}
	e := s.explanation(r, host)
	d.Explanation, d.Title = &e, host
	return nil
}

func (s *Server) sinksPage(d *pageData, _ *http.Request) error {
	for _, sink := range d.Sinks {
		row := sinkRow{Status: sink}
		for _, sub := range sink.Subscriptions {
			row.Held += sub.Held
			if sub.AckedAt.After(row.AckedAt) {
				row.AckedAt = sub.AckedAt
			}
			if sub.State == current && sub.Held == 0 && sub.Resources == 0 && sub.Names == 0 && sub.Nacks == 0 {
				row.Empty = append(row.Empty, sub)
			} else {
				row.Filled = append(row.Filled, sub)
			}
		}
		d.SinkRows = append(d.SinkRows, row)
	}
	return nil
}

// refused returns the number of objects that cannot be written.
func (c *Consumer) refused() int {
	return c.Objects[kubernetes.Refused] + c.Objects[kubernetes.Conflict]
}

// FirstRefused returns the first object that cannot be written, nil if there is
// none.
func (c *Consumer) FirstRefused() (first *kubernetes.Object) {
	if c.refused() == 0 {
		return nil
	}
	for o := range c.All() {
		if (o.State == kubernetes.Refused || o.State == kubernetes.Conflict) && (first == nil || o.Name < first.Name) {
			first = &o
		}
	}
	return first
}

// Class returns the class of what the consumer does.
func (c *Consumer) Class() string {
	switch {
	case c.Error != "" || c.refused() > 0:
		return "bad"
	case !c.Writer:
		return "faint"
	case c.Waiting || c.Objects[kubernetes.Pending] > 0:
		return "warn"
	}
	return "good"
}

// Sentence says what the consumer does.
func (c *Consumer) Sentence() string {
	switch {
	case c.Error != "":
		return "nothing can be written"
	case !c.Writer && c.Holder == "":
		return "no process writes"
	case !c.Writer:
		return "another process writes"
	case c.Waiting:
		return "waits for the first listings of registries"
	case c.refused() > 0:
		return plural(c.refused(), "object is not written", "objects are not written")
	case c.Objects[kubernetes.Pending] > 0:
		return plural(c.Objects[kubernetes.Pending], "object is still to be written", "objects are still to be written")
	}
	return "everything is written"
}

// objectClass returns the class of an object's state.
func objectClass(s kubernetes.State) string {
	switch s {
	case kubernetes.Written:
		return "good"
	case kubernetes.Refused, kubernetes.Conflict:
		return "bad"
	case kubernetes.Without:
		return "faint"
	}
	return "warn"
}

var objectShows = func() []option {
	all := []option{{"", "all"}}
	for _, state := range append(slices.Clone(kubernetes.States), kubernetes.Without) {
		all = append(all, option{string(state), string(state)})
	}
	return all
}()

func (s *Server) objectsPage(d *pageData, r *http.Request) error {
	name := r.PathValue("consumer")
	i := slices.IndexFunc(d.Consumers, func(c Consumer) bool { return c.Name == name })
	if i < 0 {
		return fmt.Errorf("there is no consumer %.50q", name)
	}
	d.Consumer, d.Shows, d.Live = &d.Consumers[i], objectShows, "none"
	q := query{text: strings.ToLower(strings.TrimSpace(d.Query.Get("q"))), after: d.Query.Get("after"), limit: pageLimit}
	show := d.Query.Get("show")
	d.Filtered = q.text != "" || show != ""
	d.Objects = page(d.Consumer.All(), q, func(o kubernetes.Object) bool {
		return either(show, string(o.State)) && contains(q.text, o.Name, o.Entry, o.Reason)
	}, func(o kubernetes.Object) string { return o.Name + " " + o.Entry })
	d.First, d.NextPage = d.turn(r, ""), d.turn(r, d.Objects.Next)
	return nil
}

func (s *Server) changesPage(d *pageData, r *http.Request) error {
	f := changeFilter{registry: d.Query.Get("registry"), text: strings.ToLower(strings.TrimSpace(d.Query.Get("q")))}
	d.Filtered = f != changeFilter{}
	var last uint64
	if after := d.Query.Get("after"); after != "" {
		if _, err := fmt.Sscan(after, &last); err != nil {
			return fmt.Errorf("after=%q: must be what the link to the next page has", after)
		}
	}
	newest := uint64(0)
	for c := range s.source.Changes() {
		newest = max(newest, c.Number)
		if last > 0 && c.Number >= last || !f.matches(&c) {
			continue
		}
		if len(d.Latest) == pageLimit {
			d.NextPage = d.turn(r, fmt.Sprint(d.Latest[pageLimit-1].Number))
			break
		}
		d.Latest = append(d.Latest, c)
	}
	d.First = d.turn(r, "")
	d.Live = "none"
	if last == 0 {
		d.Live = "stream"
		values := url.Values{"after": {fmt.Sprint(newest)}}
		if f.registry != "" {
			values.Set("registry", f.registry)
		}
		if f.text != "" {
			values.Set("q", f.text)
		}
		d.Stream = "changes/stream?" + values.Encode()
	}
	return nil
}

func (s *Server) problemsPage(d *pageData, _ *http.Request) error {
	only := d.Query.Get("registry")
	if only != "" {
		d.ProblemCount, d.SkippedCount = 0, 0
		d.Conflicts = slices.DeleteFunc(d.Conflicts, func(c status.Conflict) bool { return c.Registry != only && c.Owner != only })
	}
	for i := range d.Registries {
		r := &d.Registries[i]
		if !either(only, r.Plugin.Registry) {
			continue
		}
		if only != "" {
			d.ProblemCount, d.SkippedCount = r.ProblemCount, r.SkippedCount
		}
		d.Problems = append(d.Problems, groupProblems("p", r.Plugin.Registry, r.Problems)...)
		d.Skipped = append(d.Skipped, groupProblems("l", r.Plugin.Registry, r.Skipped)...)
	}
	return nil
}

// chart is a line over time.
type chart struct {
	Title, Now, Range, Span, Points string
}

// charts draws the samples, and returns the changes per second over the last
// two of them, as the last may be a moment old.
func charts(samples []history.Sample) (out []chart, rate string) {
	rate = "0"
	if len(samples) < 2 {
		return nil, rate
	}
	span := ago(samples[len(samples)-1].Time, samples[0].Time)
	rates := make([]float64, len(samples))
	for i := range samples[1:] {
		a, b := &samples[i], &samples[i+1]
		if i+2 == len(samples) {
			a = &samples[max(0, i-1)]
		}
		if d := b.Time.Sub(a.Time).Seconds(); d > 0.5 {
			rates[i+1] = float64(b.Changes-a.Changes) / d
		} else {
			rates[i+1] = rates[i]
		}
	}
	rates[0] = rates[min(1, len(rates)-1)]
	rate = number(rates[len(rates)-1])
	draw := func(title string, value func(i int) float64) {
		least, most := math.Inf(1), math.Inf(-1)
		for i := range samples {
			least, most = min(least, value(i)), max(most, value(i))
		}
		low, high := min(least, most*0.9), max(most, 1)
		var points []string
		for i := range samples {
			x := 300 * samples[i].Time.Sub(samples[0].Time).Seconds() / max(samples[len(samples)-1].Time.Sub(samples[0].Time).Seconds(), 1e-9)
			y := 57 - 54*(value(i)-low)/max(high-low, 1e-9)
			points = append(points, fmt.Sprintf("%.1f,%.1f", x, y))
		}
		out = append(out, chart{
			Title: title, Now: number(value(len(samples) - 1)), Span: span, Points: strings.Join(points, " "),
			Range: fmt.Sprintf("%s to %s in %s", number(least), number(most), span),
		})
	}
	draw("Services", func(i int) float64 { return float64(samples[i].Services) })
	draw("Endpoints", func(i int) float64 { return float64(samples[i].Endpoints) })
	draw("Changes a second", func(i int) float64 { return rates[i] })
	return out, rate
}

func number(v float64) string {
	if v == math.Trunc(v) || v >= 100 {
		return thousands(int64(v))
	}
	return fmt.Sprintf("%.1f", v)
}

// thousands returns a number that is not negative with separators.
func thousands(v any) string {
	digits := fmt.Sprint(v)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}

// plural returns a number that is not negative with its noun.
func plural(v any, one, more string) string {
	text := thousands(v)
	if text == "1" {
		return "1 " + one
	}
	return text + " " + more
}

// countHosts returns the number of hosts of conflicts, which are sorted.
func countHosts(all []status.Conflict) int {
	return len(slices.CompactFunc(slices.Clone(all), func(a, b status.Conflict) bool { return a.Host == b.Host }))
}

// worst returns the class of the worst of conditions, which come first.
func worst(all []conditions.Condition) string { return severityClass(all[0].Severity) }

func severityClass(s conditions.Severity) string {
	switch s {
	case conditions.Critical:
		return "bad"
	case conditions.Warning:
		return "warn"
	default:
		return "faint"
	}
}

// short returns the class of a number that should be all of another.
func short(n, of int) string {
	switch {
	case n == of:
		return ""
	case n == 0:
		return "bad"
	default:
		return "warn"
	}
}

func phaseClass(p supervisor.Phase) string {
	switch p {
	case supervisor.PhaseLive:
		return "good"
	case supervisor.PhaseFailed:
		return "bad"
	default:
		return "warn"
	}
}

// isCurrent reports whether a sink has acknowledged everything.
func isCurrent(s stream.Status) bool { return len(s.Subscriptions) > 0 && sinkState(s) == current }

// sinkState returns the state of the collection of a sink that is worst off.
func sinkState(s stream.Status) string {
	if len(s.Subscriptions) == 0 {
		return "has asked for nothing"
	}
	worst := current
	for _, sub := range s.Subscriptions {
		switch {
		case sub.State == current && sub.AckedRevision < sub.SentRevision:
			return "refused a response"
		case sub.State != current:
			worst = sub.State
		}
	}
	return worst
}

func sinkName(s stream.Status) string {
	if s.Node == "" {
		return s.Address
	}
	return s.Node + " at " + s.Address
}

// kindOf returns the name of a collection without its group.
func kindOf(coll string) string { return coll[strings.LastIndexByte(coll, '/')+1:] }

// anchor returns a name for use in an id.
func anchor(name string) string { return "registry-" + url.PathEscape(name) }

// changeText describes the change of an endpoint.
func changeText(e history.Event) string {
	switch was, is := e.Old, e.New; {
	case was != nil && is != nil && *was == *is:
		return is.Address + ", metadata"
	case was != nil && is != nil:
		text := is.Address
		if was.Address != is.Address {
			text = was.Address + " → " + is.Address
		}
		if was.Weight != is.Weight {
			text += fmt.Sprintf(", weight %d → %d", was.Weight, is.Weight)
		}
		return text
	case is != nil:
		return fmt.Sprintf("%s, weight %d", is.Address, is.Weight)
	case was != nil:
		return "was " + was.Address
	}
	if e.Version != "" {
		return "version " + e.Version
	}
	return ""
}

// healthText describes how the health of an endpoint changed. What is served is
// fit for traffic.
func healthText(e history.Event) string {
	switch {
	case e.Old != nil && e.New != nil, e.New == nil && e.Op != "remove":
		return ""
	case e.New != nil:
		return "→ in traffic"
	case e.Reason != "":
		return "in traffic → " + cmp.Or(e.Health, "idle")
	case e.Old != nil:
		return "in traffic → gone"
	}
	return ""
}

// maxInstances is the number of instances on the page of a host.
const maxInstances = 200

// firstInstances returns the instances to show, those that are not served
// first.
func firstInstances(list []ExplainedInstance) []ExplainedInstance {
	list = slices.Clone(list)
	slices.SortStableFunc(list, func(a, b ExplainedInstance) int {
		return cmp.Compare(min(len(a.Resource), 1), min(len(b.Resource), 1))
	})
	return list[:min(len(list), maxInstances)]
}

func moreInstances(s ExplainedService) uint64 {
	return s.More + uint64(max(0, len(s.Instances)-maxInstances)) //nolint:gosec // not negative
}

func pretty(body json.RawMessage) string {
	var b bytes.Buffer
	if json.Indent(&b, body, "", "  ") != nil {
		return string(body)
	}
	return b.String()
}
