package admin

import (
	"container/heap"
	"encoding/json"
	"fmt"
	"iter"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/conditions"
	"github.com/isthmus-mesh/isthmus/server/kubernetes"
	"github.com/isthmus-mesh/isthmus/server/state"
	"github.com/isthmus-mesh/isthmus/server/state/history"
	"github.com/isthmus-mesh/isthmus/server/state/status"
	"github.com/isthmus-mesh/isthmus/server/stream"
)

// Bounds of the query parameter limit.
const (
	DefaultLimit = 100
	MaxLimit     = 1000
)

// maxBodies bounds the bodies of a page of resources, in bytes: it ends before
// the first that goes beyond, and the next one begins there.
const maxBodies = 8 << 20

// query holds the query parameters of a list.
type query struct {
	registry, collection, text, after, profile string
	limit                                      int
	body                                       bool
}

// parseQuery reads the parameters of a list and rejects those that are not
// allowed. The error is meant for the client.
func parseQuery(values url.Values, allowed ...string) (q query, err error) {
	q.limit = DefaultLimit
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if !slices.Contains(allowed, name) {
			if len(allowed) == 0 {
				return q, fmt.Errorf("unknown query parameter %q; there is none", name)
			}
			return q, fmt.Errorf("unknown query parameter %q; there are %s", name, strings.Join(allowed, ", "))
		}
		value := values.Get(name)
		switch name {
		case "registry":
			q.registry = value
		case "collection":
			q.collection = value
		case "q":
			q.text = strings.ToLower(value)
		case "after":
			q.after = value
		case "profile":
			q.profile = value
		case "host": // read by its handler
		case "body":
			if q.body, err = strconv.ParseBool(value); err != nil {
				return q, fmt.Errorf("body=%s: must be true or false", value)
			}
		case "limit":
			if q.limit, err = strconv.Atoi(value); err != nil || q.limit < 1 || q.limit > MaxLimit {
				return q, fmt.Errorf("limit=%s: must be a number from 1 to %d", value, MaxLimit)
			}
		}
	}
	return q, nil
}

// list is the response to a request for a list.
type list[T any] struct {
	Items []T `json:"items"`
	// Total is the number of items that match the filters, on all pages.
	Total int `json:"total"`
	// Next is the value of the parameter after for the next page, empty on the
	// last one.
	Next string `json:"next,omitempty"`
}

// keyed is an item with its sort key.
type keyed[T any] struct {
	key  string
	item T
}

// largest is a heap with the largest key on top.
type largest[T any] []keyed[T]

func (h largest[T]) Len() int           { return len(h) }
func (h largest[T]) Less(i, j int) bool { return h[i].key > h[j].key }
func (h largest[T]) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *largest[T]) Push(x any)        { *h = append(*h, x.(keyed[T])) }
func (h *largest[T]) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}

// page returns the first items after the cursor in the order of key, which is
// unique. It holds no more items in memory than it returns. Items that come and
// go do not shift pages.
func page[T any](items iter.Seq[T], q query, match func(T) bool, key func(T) string) list[T] {
	var first largest[T]
	l := list[T]{Items: []T{}}
	for item := range yielding(items) {
		if !match(item) {
			continue
		}
		l.Total++
		k := key(item)
		if k <= q.after && q.after != "" || len(first) > q.limit && k >= first[0].key {
			continue
		}
		heap.Push(&first, keyed[T]{k, item})
		if len(first) > q.limit+1 {
			heap.Pop(&first)
		}
	}
	slices.SortFunc(first, func(a, b keyed[T]) int { return strings.Compare(a.key, b.key) })
	if len(first) > q.limit {
		first = first[:q.limit]
		l.Next = first[q.limit-1].key
	}
	for _, f := range first {
		l.Items = append(l.Items, f.item)
	}
	return l
}

func contains(text string, in ...string) bool {
	if text == "" {
		return true
	}
	return slices.ContainsFunc(in, func(s string) bool { return strings.Contains(strings.ToLower(s), text) })
}

func either(want, got string) bool { return want == "" || want == got }

func (s *Server) registries(w http.ResponseWriter, r *http.Request) {
	if _, err := parseQuery(r.URL.Query()); err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	items := s.source.Overview().Registries
	writeJSON(w, http.StatusOK, list[Registry]{Items: nonNil(items), Total: len(items)})
}

func (s *Server) conditions(w http.ResponseWriter, r *http.Request) {
	if _, err := parseQuery(r.URL.Query()); err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	items := s.source.Conditions()
	writeJSON(w, http.StatusOK, list[conditions.Condition]{Items: nonNil(items), Total: len(items)})
}

func (s *Server) sinks(w http.ResponseWriter, r *http.Request) {
	if _, err := parseQuery(r.URL.Query()); err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	items := s.source.Overview().Sinks
	writeJSON(w, http.StatusOK, list[stream.Status]{Items: nonNil(items), Total: len(items)})
}

func (s *Server) consumers(w http.ResponseWriter, r *http.Request) {
	if _, err := parseQuery(r.URL.Query()); err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	items := s.source.Overview().Consumers
	writeJSON(w, http.StatusOK, list[Consumer]{Items: nonNil(items), Total: len(items)})
}

func (s *Server) objects(w http.ResponseWriter, r *http.Request) {
	q, err := parseQuery(r.URL.Query(), "q", "limit", "after")
	if err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	for _, c := range s.source.Overview().Consumers {
		if c.Name == r.PathValue("consumer") {
			writeJSON(w, http.StatusOK, page(c.All(), q, func(o kubernetes.Object) bool {
				return contains(q.text, o.Name, o.Entry, string(o.State))
			}, func(o kubernetes.Object) string { return o.Name + " " + o.Entry }))
			return
		}
	}
	writeError(w, http.StatusNotFound, "there is no consumer of this name; /api/v1/consumers lists them")
}

func (s *Server) services(w http.ResponseWriter, r *http.Request) {
	q, err := parseQuery(r.URL.Query(), "registry", "q", "limit", "after")
	if err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	found := s.finder(q.text)
	writeJSON(w, http.StatusOK, page(s.source.Services(), q, func(v status.Service) bool {
		return either(q.registry, v.Registry) && found(v)
	}, func(v status.Service) string { return v.Name + " " + v.Registry })) // several registries may have a service of that name
}

// beginsAddress matches what an IP address may begin with.
var beginsAddress = regexp.MustCompile(`^(\d{1,3}(\.\d{1,3}){0,2}\.\d{0,3}|[0-9a-f]{1,4}:[0-9a-f:.]*)$`)

// finder returns what reports whether a text is in the name or a host of a
// service, or is the address of one of its endpoints, or its beginning.
func (s *Server) finder(text string) func(status.Service) bool {
	entries := make(map[string]bool) // those with the address
	_, err := netip.ParseAddr(text)
	if whole := err == nil && !strings.HasSuffix(text, "::"); whole || beginsAddress.MatchString(text) {
		if all, err := s.source.Resources(""); err == nil { // without a profile there is none
			for r := range yielding(all) {
				if r.Collection == collection.ServiceEntry && r.HasAddress != nil && r.HasAddress(text, whole) {
					entries[r.Name] = true
				}
			}
		}
	}
	return func(v status.Service) bool {
		return text == "" || contains(text, v.Name) || contains(text, v.Hosts...) || entries[v.Name]
	}
}

// resource is a Resource with its body.
type resource struct {
	Resource
	Body json.RawMessage `json:"body,omitempty"`
}

func (s *Server) resources(w http.ResponseWriter, r *http.Request) {
	q, err := parseQuery(r.URL.Query(), "registry", "collection", "q", "limit", "after", "body", "profile")
	var all iter.Seq[Resource]
	if err == nil {
		all, err = s.source.Resources(q.profile)
	}
	if err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	found := page(all, q, func(v Resource) bool {
		return either(q.registry, v.Registry) && either(q.collection, v.Collection) && contains(q.text, v.Name)
	}, func(v Resource) string { return v.Collection + " " + v.Name })
	answer := list[resource]{Items: make([]resource, 0, len(found.Items)), Total: found.Total, Next: found.Next}
	size := 0
	for _, v := range found.Items {
		item := resource{Resource: v}
		if q.body && v.Body != nil {
			if item.Body, err = v.Body(); err != nil {
				writeError(w, http.StatusInternalServerError, fmt.Sprintf("%s %s: %v", v.Collection, v.Name, err))
				return
			}
		}
		if size += len(item.Body); size > maxBodies && len(answer.Items) > 0 {
			last := answer.Items[len(answer.Items)-1]
			answer.Next = last.Collection + " " + last.Name
			break
		}
		answer.Items = append(answer.Items, item)
	}
	writeJSON(w, http.StatusOK, answer)
}

func (s *Server) changes(w http.ResponseWriter, r *http.Request) {
	q, err := parseQuery(r.URL.Query(), "registry", "collection", "q", "limit", "after")
	var last changeCursor
	if err == nil && q.after != "" {
		last, err = parseChangeCursor(q.after)
	}
	if err != nil {
		writeError(w, http.StatusBadRequest, err.Error())
		return
	}
	answer := list[history.Event]{Items: []history.Event{}}
	var at changeCursor
	for c := range yielding(s.source.Changes()) {
		if !either(q.registry, c.Registry) || !either(q.collection, c.Collection) || !contains(q.text, c.Name) {
			continue
		}
		answer.Total++
		at = at.next(c.Revision)
		switch {
		case q.after != "" && !at.behind(last):
		case len(answer.Items) < q.limit:
			answer.Items = append(answer.Items, c)
			if len(answer.Items) == q.limit {
				last = at
			}
		case answer.Next == "":
			answer.Next = last.String()
		}
	}
	writeJSON(w, http.StatusOK, answer)
}

// changeCursor is a position in the list of changes. The changes of one batch
// share a revision.
type changeCursor struct {
	revision state.Revision
	count    int // number of changes of that revision up to here
}

func (c changeCursor) next(revision state.Revision) changeCursor {
	if revision != c.revision {
		c = changeCursor{revision: revision}
	}
	c.count++
	return c
}

// behind reports whether c follows o in a list that begins with the newest.
func (c changeCursor) behind(o changeCursor) bool {
	return c.revision < o.revision || c.revision == o.revision && c.count > o.count
}

func (c changeCursor) String() string { return fmt.Sprintf("%d-%d", c.revision, c.count) }

func parseChangeCursor(s string) (c changeCursor, err error) {
	revision, count, ok := strings.Cut(s, "-")
	var number uint64
	if number, err = strconv.ParseUint(revision, 10, 64); err == nil {
		c.revision = state.Revision(number)
		c.count, err = strconv.Atoi(count)
	}
	if !ok || err != nil {
		return c, fmt.Errorf("after=%s: must be what next of the page before says", s)
	}
	return c, nil
}

func nonNil[T any](s []T) []T {
	if s == nil {
		return []T{}
	}
	return s
}

func (s *Server) noSuchCall(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		writeError(w, http.StatusMethodNotAllowed, "this call is read-only: use GET; POST is for /api/v1/reload, /api/v1/compare, /api/v1/loglevel, /api/v1/registries/NAME/removals/allow and /api/v1/registries/NAME/removals/keep")
		return
	}
	writeError(w, http.StatusNotFound, fmt.Sprintf("there is no %s; there are /api/v1/status, /api/v1/registries, /api/v1/services, /api/v1/resources, /api/v1/sinks, /api/v1/consumers, /api/v1/changes, /api/v1/removals, /api/v1/conditions, /api/v1/explain", r.URL.Path))
}

func writeError(w http.ResponseWriter, code int, reason string) {
	writeJSON(w, code, map[string]string{"error": reason})
}

func writeJSON(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	_ = enc.Encode(v) // an error means that the client disconnected
}
