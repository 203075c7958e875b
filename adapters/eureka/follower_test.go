package eureka

import (
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

// fake is a Eureka whose answers a test writes. A request that is not of the
// API, or that asks for anything but JSON, fails the test.
type fake struct {
	*httptest.Server

	mu     sync.Mutex // guards everything below
	asked  []string   // paths
	answer map[string]func(w http.ResponseWriter)
}

func newFake(t *testing.T) *fake {
	f := &fake{answer: map[string]func(http.ResponseWriter){}}
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		path := strings.TrimPrefix(r.URL.Path, "/eureka")
		f.mu.Lock()
		f.asked = append(f.asked, path)
		answer := f.answer[path]
		f.mu.Unlock()
		if answer == nil || r.Method != http.MethodGet || r.Header.Get("Accept") != "application/json" {
			t.Errorf("unexpected request: %s %s %v", r.Method, r.URL, r.Header)
			http.Error(w, "unexpected", http.StatusTeapot)
			return
		}
		answer(w)
	}))
	t.Cleanup(f.Close)
	return f
}

func (f *fake) say(path string, answer func(w http.ResponseWriter)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answer[path] = answer
}

// took returns what was asked for since the last call.
func (f *fake) took() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	defer func() { f.asked = nil }()
	return strings.Join(f.asked, " ")
}

func body(text string) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) { fmt.Fprint(w, text) }
}

// apps is an answer with instances that are up, "APP/ID", and their right hash
// code; "-APP/ID" is one that is gone.
func apps(instances ...string) string { return appsOf("", instances...) }

func appsOf(hash string, instances ...string) string {
	var all []string
	n := 0
	for _, i := range instances {
		action := "ADDED"
		if i, _ = strings.CutPrefix(i, "~"); strings.HasPrefix(i, "-") {
			i, action = i[1:], "DELETED"
		} else {
			n++
		}
		app, id, _ := strings.Cut(i, "/")
		all = append(all, fmt.Sprintf(`{"name":%q,"instance":[{"instanceId":%q,"ipAddr":"10.0.0.1","status":"UP","port":{"$":80,"@enabled":"true"},"actionType":%q}]}`, app, id, action))
	}
	if hash == "" && n > 0 {
		hash = fmt.Sprintf("UP_%d_", n)
	}
	return fmt.Sprintf(`{"applications":{"versions__delta":"1","apps__hashcode":%q,"application":[%s]}}`, hash, strings.Join(all, ","))
}

func status(code int) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) { http.Error(w, "<html>no</html>", code) }
}

// cut ends the connection after a part of an answer.
func cut(text string, at int) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) {
		w.Header().Set("Content-Length", fmt.Sprint(len(text)))
		fmt.Fprint(w, text[:at])
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
}

func newFollower(t *testing.T, servers ...*fake) *follower {
	c := DefaultConfig
	var urls []string
	for _, s := range servers {
		urls = append(urls, s.URL+"/eureka")
	}
	c.Servers = urls
	a, err := newAdapter(c, plugin.Env{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.client.Close)
	return &follower{Adapter: a, catalog: plugintest.NewCatalog(), servers: plugin.NewServers(urls)}
}

// brief writes a listing as "+WEB:a,b" for a service, "-WEB" for one that is
// gone, "whole" and "lost".
func brief(l plugin.Listing) string {
	var all []string
	if l.Complete {
		all = append(all, "whole")
	}
	if l.Lost != nil {
		all = append(all, "lost")
	}
	if l.Doubt != nil {
		all = append(all, "doubt")
	}
	services := map[string]string{}
	for _, s := range l.Services {
		var ids []string
		for _, i := range s.Instances {
			ids = append(ids, i.ID)
		}
		services[s.Service.Key.Name] = strings.Join(ids, ",")
	}
	for _, name := range slices.Sorted(maps.Keys(services)) {
		all = append(all, "+"+name+":"+services[name])
	}
	for _, k := range l.Removed {
		all = append(all, "-"+k.Name)
	}
	return strings.Join(all, " ")
}

// want fetches, and compares the listing, the error and the requests.
func (f *follower) want(t *testing.T, when string, server *fake, asked, listing, fault string) {
	t.Helper()
	l, err := f.fetch(t.Context())
	if (err == nil) != (fault == "") || err != nil && !strings.Contains(err.Error(), fault) {
		t.Errorf("%s: error %v, want %q", when, err, fault)
	}
	if got := brief(l); got != listing {
		t.Errorf("%s: listing %q, want %q", when, got, listing)
	}
	if got := server.took(); got != asked {
		t.Errorf("%s: asked for %q, want %q", when, got, asked)
	}
}

// TestFetch shows what is asked for, and each answer that is none.
func TestFetch(t *testing.T) {
	s := newFake(t)
	f := newFollower(t, s)
	s.say("/apps", body(apps("WEB/a", "DB/x")))
	f.want(t, "first", s, "/apps", "whole +DB:x +WEB:a", "")
	s.say("/apps/delta", body(appsOf("UP_2_")))
	f.want(t, "no change", s, "/apps/delta", "", "")
	s.say("/apps/delta", body(appsOf("UP_2_", "WEB/b", "-DB/x")))
	f.want(t, "changes", s, "/apps/delta", "+WEB:a,b -DB", "")
	f.want(t, "the same again", s, "/apps/delta", "", "")

	s.say("/apps", body(apps("WEB/a", "WEB/b", "WEB/c")))
	s.say("/apps/delta", body(appsOf("UP_3_", "WEB/b")))
	f.want(t, "a change was missed", s, "/apps/delta /apps", "whole +WEB:a,b,c", "")
	s.say("/apps/delta", body(appsOf("UP_1_")))
	s.say("/apps", status(http.StatusServiceUnavailable))
	f.want(t, "a change was missed, and no list", s, "/apps/delta /apps", "", "status 503")
	s.say("/apps", body(apps("WEB/a")))
	f.want(t, "what does not fit is not gone on with", s, "/apps", "whole +WEB:a", "")

	for what, answer := range map[string]func(http.ResponseWriter){
		"status 500": status(http.StatusInternalServerError), "status 401: it wants": status(http.StatusUnauthorized), "not a list of applications": body("{}"),
		"invalid character": body("<html>"), "unexpected EOF": cut(apps("WEB/a"), 100), "status 302": func(w http.ResponseWriter) {
			w.Header().Set("Location", "http://example.org/")
			w.WriteHeader(http.StatusFound)
		},
	} {
		s.say("/apps/delta", answer)
		f.want(t, what, s, "/apps/delta", "", what)
	}
	whole := apps("WEB/a", "WEB/b")
	for at := 0; at < len(whole); at += 7 {
		s.say("/apps/delta", cut(whole, at))
		f.want(t, fmt.Sprint("cut at ", at), s, "/apps/delta", "", s.URL)
	}
	s.say("/apps/delta", body(appsOf("UP_1_")))
	f.want(t, "what is known is still known", s, "/apps/delta", "", "")

	f.last = time.Now().Add(-remembered)
	f.want(t, "after a pause", s, "/apps", "whole +WEB:a", "")
	f.whole = time.Now().Add(-time.Duration(f.config.FullInterval))
	f.want(t, "now and then", s, "/apps", "whole +WEB:a", "")

	s.say("/apps/delta", status(http.StatusForbidden))
	f.want(t, "no changes are told", s, "/apps/delta /apps", "whole +WEB:a", "")
	f.want(t, "and are not asked for", s, "/apps", "whole +WEB:a", "")
	s.say("/apps", body(appsOf("UP_7_", "WEB/a")))
	f.want(t, "half a list", s, "/apps", "whole doubt +WEB:a", "")
	s.say("/apps", body(apps()))
	f.want(t, "an empty list", s, "/apps", "whole", "")
	f.want(t, "and again", s, "/apps", "whole", "")
	for at := 0; at < len(whole); at += 7 {
		s.say("/apps", cut(whole, at))
		f.want(t, fmt.Sprint("a list that is cut off at ", at), s, "/apps", "", s.URL)
	}
}

// TestPeers shows fail-over: another server is asked for everything, and stays
// in use; the error of all names each.
func TestPeers(t *testing.T) {
	a, b := newFake(t), newFake(t)
	f := newFollower(t, a, b)
	for _, s := range []*fake{a, b} {
		s.say("/apps", body(apps("WEB/a")))
		s.say("/apps/delta", body(appsOf("UP_1_")))
	}
	f.want(t, "first", a, "/apps", "whole +WEB:a", "")
	a.say("/apps/delta", status(http.StatusBadGateway))
	f.want(t, "the first fails", b, "/apps", "whole lost +WEB:a", "")
	if got := a.took(); got != "/apps/delta" {
		t.Errorf("the first was asked for %q", got)
	}
	a.say("/apps/delta", body(appsOf("UP_1_")))
	f.want(t, "the second stays", b, "/apps/delta", "", "")
	if got := f.servers.String(); !strings.HasPrefix(got, b.URL) || !strings.Contains(got, a.URL+"/eureka answers status 502 since") {
		t.Errorf("detail: %s", got)
	}
	b.say("/apps/delta", status(http.StatusBadGateway))
	a.say("/apps", status(http.StatusForbidden))
	f.want(t, "both fail", b, "/apps/delta", "", a.URL+"/eureka: answers status 403")
	b.say("/apps", status(http.StatusBadGateway))
	a.say("/apps", body(apps("WEB/a", "WEB/b")))
	f.want(t, "the first again", b, "/apps", "whole lost +WEB:a,b", "")
}
