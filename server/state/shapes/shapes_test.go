package shapes

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/server/changelog"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// entry is an entry in tests; nil is none.
type entry struct {
	name     string
	registry int
	content  [2]encode.Hash // by shape; 0: the shape does not show it
	places   Places
}

func (e *entry) Shows(s encode.Shape) bool       { return e != nil && e.content[s] != 0 }
func (e *entry) Hash(s encode.Shape) encode.Hash { return e.content[s] }
func (e *entry) Places() *Places                 { return &e.places }
func (e *entry) IsOfRegistry(other *entry) bool  { return e.registry == other.registry }

// reader has read names of one shape, with their content and registry.
type reader struct {
	shape  encode.Shape
	cursor changelog.Cursor
	has    map[string]string
}

func said(e *entry, s encode.Shape) string { return fmt.Sprint(e.content[s], " of ", e.registry) }

// A reader of either shape, at any pace, ends with what there is; a change is
// said to be one if and only if the content is another, and handed over if only
// the registry is.
func TestModel(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 5))
		perShape := seed%3 > 0
		logs, at, limit := New[*entry](perShape), changelog.Revision(0), 3+r.IntN(20)
		listed := map[string]*entry{} // what holds the place of each name
		var lock sync.Mutex
		readers := []*reader{{shape: encode.Inline}, {shape: encode.Workload}}
		for step := range 200 {
			name := fmt.Sprint("n", r.IntN(30))
			old := listed[name]
			var now *entry
			if r.IntN(3) > 0 {
				now = &entry{name: name, registry: r.IntN(2), content: [2]encode.Hash{encode.Hash(1 + r.IntN(2)), encode.Hash(r.IntN(3))}}
				if !perShape {
					now.content[1] = now.content[0]
				}
			}
			var tomb *entry
			before := at
			changed := logs.Move(old, now, &at, func() *entry {
				if tomb == nil {
					tomb = &entry{name: name}
				}
				return tomb
			})
			for _, l := range logs {
				s := l.shape
				is := old.Shows(s) != now.Shows(s) || now.Shows(s) && (old.content[s] != now.content[s] || old.registry != now.registry)
				if is != (changed&Of(s) > 0) {
					t.Fatalf("seed %d, step %d: from %+v to %+v, changed %b", seed, step, old, now, changed)
				}
			}
			if (changed == 0) != (at == before) {
				t.Fatalf("seed %d, step %d: revisions %d and %d, changed %b", seed, step, before, at, changed)
			}
			if delete(listed, name); now != nil {
				listed[name] = now
			} else if tomb != nil {
				listed[name] = tomb
			}
			logs.Evict(limit, func(e *entry) {
				if listed[e.name] == e && !e.Shows(encode.Inline) && !e.Shows(encode.Workload) {
					delete(listed, e.name)
				}
			})
			if r.IntN(40) == 0 {
				of := r.IntN(2)
				logs.Republish(&at, func(e *entry) bool { return e.registry == of })
			}
			if r.IntN(80) == 0 {
				at++
				logs.Reset(at)
				for _, e := range listed {
					e.places = Places{}
				}
				was := listed
				listed = map[string]*entry{}
				for name, e := range was {
					if logs.Enter(e, &at); e.places != (Places{}) {
						listed[name] = e
					}
				}
			}
			for _, read := range readers {
				if r.IntN(8) > 0 && step < 199 {
					continue
				}
				for again := true; again; {
					again = false
					if read.has == nil {
						read.has = map[string]string{}
					}
					logs.In(read.shape).Follow(&lock, &at, &read.cursor, func(c changelog.Change[*entry]) bool {
						if c.Removed {
							delete(read.has, c.Entry.name)
							return true
						}
						text := said(c.Entry, read.shape)
						if was := read.has[c.Entry.name]; c.Handed && was == "" {
							t.Fatalf("seed %d, step %d: %s is handed over, and was not read", seed, step, c.Entry.name)
						}
						read.has[c.Entry.name] = text
						return true
					})
					if read.cursor.Lost {
						read.cursor, read.has, again = changelog.Cursor{}, nil, true
					}
				}
				want := map[string]string{}
				for name, e := range listed {
					if e.Shows(read.shape) {
						want[name] = said(e, read.shape)
					}
				}
				if d := cmp.Diff(want, read.has); d != "" {
					t.Fatalf("seed %d, step %d, %v (-want +got):\n%s", seed, step, read.shape, d)
				}
				if logs.In(read.shape).Len() != len(want) {
					t.Fatalf("seed %d, step %d: %d names, want %d", seed, step, logs.In(read.shape).Len(), len(want))
				}
			}
		}
	}
}
