package kubernetes

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// fake is an API server for what a real one does only rarely.
type fake struct {
	mu sync.Mutex
	// guarded by mu
	lists   map[string][]string // answers by resource, in order; the last one stays
	watches map[string][]string
	queries []url.Values
	streams bool          // it lists by watches too
	ending  chan struct{} // closed to end the watches that are silent

	silent chan struct{} // one for each watch that was silent at first
}

// open waits until the watches of both resources are open and silent.
func (f *fake) open() {
	for range 2 {
		<-f.silent
	}
}

// end ends the silent watches of both resources.
func (f *fake) end() {
	f.open()
	f.endNow()
}

func (f *fake) endNow() {
	f.mu.Lock()
	defer f.mu.Unlock()
	close(f.ending)
	f.ending = make(chan struct{})
}

func startFake(t *testing.T) (*fake, string) {
	t.Helper()
	f := &fake{lists: map[string][]string{}, watches: map[string][]string{}, ending: make(chan struct{}), silent: make(chan struct{}, 100)}
	f.say("services", listing("ServiceList", 5, serviceJSON("web")))
	f.say("endpointslices", listing("EndpointSliceList", 5, sliceJSON("web-a", "10.1.0.1"), sliceJSON("web-b", "10.1.0.2")))
	srv := httptest.NewServer(f)
	t.Cleanup(func() {
		f.endNow()
		srv.Close()
	})
	return f, srv.URL
}

func (f *fake) say(resource string, answers ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lists[resource] = answers
}

// sayWatch makes each of the next watches of a resource send one text and end.
func (f *fake) sayWatch(resource string, texts ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.watches[resource] = texts
}

// ServeHTTP implements http.Handler.
func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]
	f.mu.Lock()
	if r.URL.Query().Has("sendInitialEvents") && !f.streams {
		f.mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusUnprocessableEntity)
		_, _ = io.WriteString(w, statusInvalid)
		return
	}
	f.queries = append(f.queries, r.URL.Query())
	from := f.lists
	watch := r.URL.Query().Get("watch") != ""
	if watch {
		from = f.watches
	}
	answer := ""
	if all := from[resource]; len(all) > 0 {
		if answer = all[0]; len(all) > 1 || watch {
			from[resource] = all[1:]
		}
	}
	ending := f.ending
	f.mu.Unlock()
	code := http.StatusOK
	if n, rest, ok := strings.Cut(answer, "!"); ok && len(n) == 3 {
		_, _ = fmt.Sscan(n, &code)
		answer = rest
	}
	w.Header().Set("Content-Type", "application/json")
	if strings.HasPrefix(answer, "<") {
		w.Header().Set("Content-Type", "text/html")
	}
	w.WriteHeader(code)
	_, _ = io.WriteString(w, answer)
	if watch && answer == "" { // silent and open
		_ = http.NewResponseController(w).Flush()
		f.silent <- struct{}{}
		select {
		case <-r.Context().Done():
		case <-ending:
		}
	}
}

func listing(kind string, revision int, items ...string) string {
	return fmt.Sprintf(`{"kind":%q,"metadata":{"resourceVersion":"%d"},"items":[%s]}`, kind, revision, strings.Join(items, ","))
}

func serviceJSON(name string) string {
	return fmt.Sprintf(`{"metadata":{"namespace":"default","name":%q,"resourceVersion":"1"},"spec":{"ports":[{"port":80}]}}`, name)
}

func sliceJSON(name, address string) string {
	return fmt.Sprintf(`{"metadata":{"namespace":"default","name":%q,"resourceVersion":"2","labels":{"kubernetes.io/service-name":"web"}},"addressType":"IPv4","ports":[{"port":8080}],"endpoints":[{"addresses":[%q]}]}`, name, address)
}

func eventJSON(kind, object string, revision int) string {
	return fmt.Sprintf(`{"type":%q,"object":%s}`, kind, strings.Replace(object, `"resourceVersion":"2"`, fmt.Sprintf(`"resourceVersion":"%d"`, revision), 1)) + "\n"
}

// statusInvalid is what a server says that cannot list by a watch.
const statusInvalid = `{"kind":"Status","status":"Failure","code":422,"reason":"Invalid","message":"sendInitialEvents is forbidden for watch"}`

const statusGone = `{"kind":"Status","status":"Failure","code":410,"reason":"Expired","message":"too old resource version"}`

// TestNoAnswer shows that what is no answer of an API server removes nothing,
// is shown with a reason, and that its end is noticed.
func TestNoAnswer(t *testing.T) {
	whole := listing("EndpointSliceList", 7, sliceJSON("web-a", "10.1.0.1"), sliceJSON("web-b", "10.1.0.2"), sliceJSON("web-c", "10.1.0.3"))
	for what, x := range map[string]struct{ list, watch, reason string }{
		"a page of a proxy":        {list: "<html>login</html>", reason: "text/html"},
		"an error":                 {list: `500!{"kind":"Status","status":"Failure","message":"etcd is slow","code":500}`, reason: "etcd is slow"},
		"an error of a proxy":      {list: "502!<p>bad gateway</p>", reason: "bad gateway"},
		"a redirect":               {list: "302!", reason: "302"},
		"nothing":                  {list: " ", reason: "no JSON"},
		"another kind":             {list: `{"kind":"Status","metadata":{}}`, reason: "not a list"},
		"a list without revision":  {list: `{"kind":"EndpointSliceList","metadata":{},"items":[]}`, reason: "not a list"},
		"half a list":              {list: `{"kind":"EndpointSliceList","metadata":{"resourceVersion":"9"},"items":[`, reason: "no JSON"},
		"an empty list":            {list: listing("EndpointSliceList", 9), reason: "accept_empty"},
		"a circle":                 {list: `{"kind":"EndpointSliceList","metadata":{"resourceVersion":"9","continue":"x"},"items":[]}`, reason: "circle"},
		"a page that expired":      {list: "410!" + statusGone, reason: ""},
		"a watch refused":          {watch: `403!{"kind":"Status","status":"Failure","message":"cannot watch","reason":"Forbidden","code":403}`, reason: "grant"},
		"a watch that expired":     {watch: "410!" + statusGone, reason: ""},
		"an event that is none":    {watch: "{", reason: ""},
		"an event of another type": {watch: `{"type":"NEW","object":{}}` + "\n", reason: ""},
		"an event out of time":     {watch: eventJSON("DELETED", sliceJSON("web-a", "10.1.0.1"), 1), reason: "went back"},
		"an error as an event":     {watch: `{"type":"ERROR","object":{"kind":"Status","code":500,"message":"overloaded"}}` + "\n", reason: ""},
		"an expired event":         {watch: `{"type":"ERROR","object":` + statusGone + "}\n", reason: ""},
		"an object that is none":   {watch: eventJSON("MODIFIED", `{"metadata":{"namespace":"default","name":"web-a","resourceVersion":"9"},"endpoints":{}}`, 9), reason: ""},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			f, server := startFake(t)
			// What becomes known after the failure, by a listing or a watch.
			third := eventJSON("ADDED", sliceJSON("web-c", "10.1.0.3"), 10)
			if x.list != "" {
				f.say("endpointslices", listing("EndpointSliceList", 5, sliceJSON("web-a", "10.1.0.1"), sliceJSON("web-b", "10.1.0.2")), x.list, x.list, whole)
				f.sayWatch("endpointslices", "", "410!"+statusGone)
			} else {
				f.say("endpointslices", listing("EndpointSliceList", 5, sliceJSON("web-a", "10.1.0.1"), sliceJSON("web-b", "10.1.0.2")), listing("EndpointSliceList", 6, sliceJSON("web-a", "10.1.0.1"), sliceJSON("web-b", "10.1.0.2")), whole)
				f.sayWatch("endpointslices", "", x.watch, third)
			}
			c, _ := start(t, Config{Server: server, TokenFile: tokenFile(t), RemoveGrace: plugin.Duration(time.Millisecond)}, func(a *Adapter) { a.rediscover = 50 * time.Millisecond })
			c.AwaitIDs(t, within, "the first list", "default/web", web2)
			f.end() // the first watch
			if what == "an empty list" {
				// A listing that is not believed is no failed one.
				c.Await(t, within, what, func(h *plugintest.Held) bool { return strings.Contains(h.Degraded, "accept_empty") })
				f.sayWatch("endpointslices", "410!"+statusGone, "410!"+statusGone)
				f.end()
			}
			c.AwaitIDs(t, within, "the end of it", "default/web", web2+" 10.1.0.3:8080")
			c.Await(t, within, "the end of it", func(h *plugintest.Held) bool { return h.Degraded == "" })
			wantLeast(t, c)
			c.Look(func(h *plugintest.Held) {
				if said := strings.Join(h.Reasons, "\n"); !strings.Contains(said, x.reason) {
					t.Errorf("reasons %q, want %q among them", said, x.reason)
				}
			})
		})
	}
}

// TestAwayInParts shows that what is known of EndpointSlices, which cannot be
// listed yet, confirms no endpoint when Services can be: an endpoint that left
// meanwhile is retained.
func TestAwayInParts(t *testing.T) {
	f, server := startFake(t)
	const fault = `500!{"kind":"Status","status":"Failure","message":"etcd is slow","code":500}`
	both := listing("EndpointSliceList", 5, sliceJSON("web-a", "10.1.0.1"), sliceJSON("web-b", "10.1.0.2"))
	f.say("endpointslices", both, fault, fault, listing("EndpointSliceList", 9, sliceJSON("web-a", "10.1.0.1")))
	f.sayWatch("endpointslices", "", fault)
	f.sayWatch("services", "", fault)
	c, _ := start(t, Config{Server: server, TokenFile: tokenFile(t), RemoveGrace: plugin.Duration(time.Hour)})
	c.AwaitIDs(t, within, "the first list", "default/web", web2)
	f.end()
	c.Await(t, within, "the end of it", func(h *plugintest.Held) bool {
		return strings.Contains(h.Degraded, "remove_grace") || h.IDs("default/web") != web2
	})
	wantLeast(t, c)
}

// TestPodsAway shows that pods that cannot be watched any more are listed as a
// problem, and hold up no endpoint that leaves.
func TestPodsAway(t *testing.T) {
	f, server := startFake(t)
	const forbidden = `403!{"kind":"Status","status":"Failure","message":"cannot watch pods","reason":"Forbidden","code":403}`
	of := func(name, version string) string {
		return strings.Replace(podJSON(name, version), `"name"`, `"resourceVersion":"3","name"`, 1)
	}
	f.say("pods", listing("PodList", 5, of("web-a", "v1")), forbidden)
	f.sayWatch("pods", forbidden)
	slice := func(endpoints string) string {
		return `{"metadata":{"namespace":"default","name":"web-a","resourceVersion":"2","labels":{"kubernetes.io/service-name":"web"}},"addressType":"IPv4","ports":[{"port":8080}],"endpoints":[` + endpoints + `]}`
	}
	const one, two = `{"addresses":["10.1.0.1"],"targetRef":{"kind":"Pod","name":"web-a"}}`, `{"addresses":["10.1.0.2"],"targetRef":{"kind":"Pod","name":"web-b"}}`
	f.say("endpointslices", listing("EndpointSliceList", 5, slice(one+","+two)))
	f.sayWatch("endpointslices", "", eventJSON("MODIFIED", slice(one), 9))
	c, _ := start(t, Config{Server: server, TokenFile: tokenFile(t), Pods: Pods{Labels: plugin.Globs{"version"}}})
	c.Await(t, within, "the problem", func(h *plugintest.Held) bool {
		return strings.Contains(h.Problems["pods"], "grant") && h.IDs("default/web") == "web-a web-b"
	})
	f.end()
	c.AwaitIDs(t, within, "an endpoint that leaves", "default/web", "web-a")
	c.Look(func(h *plugintest.Held) {
		if h.Instances["default/web"][0].Meta["version"] != "v1" || h.Degraded != "" || len(h.Reasons) != 0 || h.Problems["pods"] == "" {
			t.Errorf("instances %+v, degraded %q, problems %q", h.Instances, h.Reasons, h.Problems)
		}
	})
}

// TestPages shows that a listing is read in pages, and a watch goes on at its
// revision, with bookmarks.
func TestPages(t *testing.T) {
	f, server := startFake(t)
	page := func(next string, items ...string) string {
		return fmt.Sprintf(`{"kind":"EndpointSliceList","metadata":{"resourceVersion":"9","continue":%q},"items":[%s]}`, next, strings.Join(items, ","))
	}
	f.say("endpointslices", page("two", sliceJSON("web-a", "10.1.0.1")), page("", sliceJSON("web-b", "10.1.0.2")))
	c, stop := start(t, Config{Server: server, TokenFile: tokenFile(t), Labels: "app=web"})
	c.AwaitIDs(t, within, "both pages", "default/web", web2)
	f.open()
	stop()
	f.mu.Lock()
	defer f.mu.Unlock()
	second, watch := false, false
	for _, q := range f.queries {
		second = second || q.Get("continue") == "two" && q.Get("limit") == "500"
		watch = watch || q.Get("watch") == "true" && q.Get("resourceVersion") == "9" && q.Get("allowWatchBookmarks") == "true" && q.Get("timeoutSeconds") != ""
	}
	if !second || !watch {
		t.Errorf("requests %v", f.queries)
	}
}

// FuzzMessages shows that no answer of a server makes the adapter panic: a page
// of a listing, then the events of a watch.
func FuzzMessages(f *testing.F) {
	f.Add([]byte(listing("ServiceList", 5, serviceJSON("web"))), []byte(eventJSON("ADDED", sliceJSON("web-a", "10.1.0.1"), 9)))
	f.Add([]byte(listing("ServiceEntryList", 5, `{"metadata":{"namespace":"a","name":"b"},"spec":{"hosts":["x"],"new":1}}`)), []byte(`{"type":"DELETED","object":{"metadata":{"namespace":"a","name":"b"}}}`))
	f.Add([]byte(listing("EndpointSliceList", 5, `{"metadata":{"namespace":"a","name":"b"},"endpoints":{}}`)), []byte(`{"type":"ERROR","object":[]}`))
	a, err := New(Config{Server: "https://192.0.2.1", TLS: plugin.TLS{InsecureSkipVerify: true}, Revision: "", Follow: followServices, Pods: Pods{Labels: plugin.Globs{"*"}, ServiceAccounts: true}}, plugin.Env{})
	if err != nil {
		f.Fatal(err)
	}
	deep := strings.Repeat(`{"spec":`, 9000) + "1" + strings.Repeat("}", 9000)
	f.Add([]byte(listing("ServiceEntryList", 5, deep)), []byte(`{"type":"ADDED","object":`+deep+`}`))
	f.Fuzz(func(t *testing.T, listed, events []byte) {
		for _, kind := range []string{"Service", "EndpointSlice", "Pod", "ServiceExport", "ServiceImport", "networking.istio.io/ServiceEntry"} {
			var of follower = newState(a.(*Adapter), nil)
			if strings.Contains(kind, "/") {
				of = newObjects(a.(*Adapter), nil)
			}
			k := &cluster{config: &rest.Config{Host: "http://192.0.2.1"}}
			c, err := k.connect(time.Second, nil)
			if err != nil {
				t.Fatal(err)
			}
			answers := [][]byte{listed, events}
			c.http.Transport = roundTrip(func(*http.Request) (*http.Response, error) {
				if len(answers) == 0 {
					return nil, errors.New("no more")
				}
				body := answers[0]
				answers = answers[1:]
				return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(string(body)))}, nil
			})
			touched := map[registry.Key]bool{}
			s := source{path: "/x", kind: kind}
			p, err := c.list(t.Context(), s, metav1.ListOptions{})
			if err != nil {
				continue
			}
			for i := range p.Items {
				of.read(kind, &p.Items[i])
				of.put(kind, &p.Items[i], touched)
			}
			catalog := &publisher{Publisher: plugintest.NewCatalog()}
			publish := func(l plugin.Listing) {
				for _, x := range l.Services {
					for i, in := range x.Instances {
						if in.ID == "" || i > 0 && in.ID == x.Instances[i-1].ID {
							t.Errorf("instances %v", x.Instances)
						}
					}
					if strings.Contains(kind, "/") {
						catalog.Set(x.Service, x.Instances)
					}
				}
			}
			publish(of.all())
			w, err := c.watch(t.Context(), s, metav1.ListOptions{TimeoutSeconds: new(int64(60))})
			if err != nil {
				t.Fatal(err)
			}
			for e := range w.ResultChan() {
				clear(touched)
				o, ok := e.Object.(*object)
				switch {
				case !ok:
				case e.Type == watch.Deleted:
					of.remove(kind, o.name(), touched)
				case e.Type != watch.Bookmark:
					of.read(kind, o)
					of.put(kind, o, touched)
				}
				publish(of.changed(maps.Keys(touched)))
			}
			w.Stop()
			of.tell(catalog)
		}
	})
}

type roundTrip func(*http.Request) (*http.Response, error)

// RoundTrip implements http.RoundTripper.
func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
