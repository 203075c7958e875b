package plugin

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// told notes what a catalog is told of the registry as a whole. It has no lock:
// calls must not overlap.
type told struct {
	Catalog
	degraded []string // "" for what was taken back
	synced   int
}

func (c *told) Degraded(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	c.degraded = append(c.degraded, text)
}

func (c *told) Synced() { c.synced++ }

// now returns what is shown, "" for nothing.
func (c *told) now() string {
	if len(c.degraded) == 0 {
		return ""
	}
	return c.degraded[len(c.degraded)-1]
}

// trouble is a kind of fault in these tests, of which the smaller ones matter
// more.
type trouble int

const (
	away trouble = iota
	denied
	lacking
)

// Each step is one call, and what the catalog was told by it; "-" is nothing.
func TestFaults(t *testing.T) {
	type step struct {
		part string
		kind trouble
		err  string // "" clears the part
		want string
	}
	for name, steps := range map[string][]step{
		"the order is that of the kinds": {
			{"a", lacking, "L", "L"},
			{"b", away, "A", "A; L"},
			{"c", denied, "D", "A; D; L"},
			{"b", 0, "", "D; L"},
			{"a", 0, "", "D"},
			{"c", 0, "", ""},
		},
		"the first text stays while it holds": {
			{"a", away, "one", "one"},
			{"b", away, "two", "-"},
			{"c", away, "one", "-"},
			{"a", 0, "", "-"}, // c has it
			{"b", 0, "", "-"},
			{"c", 0, "", ""},
		},
		"the text of a part that recovered goes, and the newest comes": {
			{"a", away, "one", "one"},
			{"b", away, "two", "-"},
			{"c", away, "three", "-"},
			{"a", 0, "", "three"},
			{"b", 0, "", "-"},
			{"c", 0, "", ""},
		},
		"a part that fails in another way shows that": {
			{"a", away, "one", "one"},
			{"a", away, "one", "-"},
			{"a", away, "two", "two"},
			{"b", away, "three", "-"},
			{"a", away, "four", "four"},
			{"b", away, "five", "-"},
			{"b", 0, "", "-"},
			{"a", 0, "", ""},
		},
		"a part has one fault": {
			{"a", away, "one", "one"},
			{"a", denied, "two", "two"},
			{"b", away, "three", "three; two"},
			{"a", away, "four", "three"},
			{"b", 0, "", "four"},
			{"a", 0, "", ""},
		},
		"the same text of two kinds is two sentences": {
			{"a", away, "X", "X"},
			{"b", lacking, "X", "X; X"},
			{"a", 0, "", "X"},
			{"b", away, "X", "-"},
			{"b", 0, "", ""},
		},
		"nothing is taken back where nothing was": {
			{"a", 0, "", "-"},
			{"a", away, "one", "one"},
			{"b", 0, "", "-"},
			{"a", 0, "", ""},
			{"a", 0, "", "-"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := &told{}
			f := NewFaults[trouble](c)
			for i, s := range steps {
				c.degraded = nil
				if s.err != "" {
					f.Set(s.part, s.kind, errors.New(s.err))
				} else if i%2 == 0 {
					f.Clear(s.part)
				} else {
					f.Set(s.part, s.kind, nil)
				}
				want := []string{s.want}
				if s.want == "-" {
					want = nil
				}
				if diff := cmp.Diff(want, c.degraded); diff != "" {
					t.Fatalf("step %d, %+v: told (-want +got):\n%s", i, s, diff)
				}
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			if len(f.parts) > 0 {
				t.Errorf("parts %v are kept", f.parts)
			}
			for _, k := range f.kinds {
				if len(k.sentences) > 0 || k.order.Len() > 0 || k.shown != nil {
					t.Errorf("sentences of kind %v are kept", k.kind)
				}
			}
		})
	}
}

// An error that says nothing is a fault all the same, and one that says too
// much is cut.
func TestFaultsOddTexts(t *testing.T) {
	c := &told{}
	f := NewFaults[trouble](c)
	f.Set("a", away, errors.New(""))
	if c.now() != "unknown error" {
		t.Errorf("an error without text is %q", c.now())
	}
	f.Set("a", away, errors.New(strings.Repeat("x", 10*maxReasonBytes)))
	if len(c.now()) != maxReasonBytes {
		t.Errorf("a long text has %d bytes", len(c.now()))
	}
}

// A storm is one call each way where all say the same, and hardly more where
// each says its own, in whatever order they recover.
func TestFaultsStorm(t *testing.T) {
	const parts = 5_000
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same in each run
	orders := map[string][]int{}
	for i := range parts {
		orders["first to last"] = append(orders["first to last"], i)
		orders["last to first"] = append(orders["last to first"], parts-1-i)
	}
	orders["any"] = random.Perm(parts)
	for name, order := range orders {
		for _, same := range []bool{true, false} {
			c := &told{}
			f := NewFaults[trouble](c)
			for i := range parts {
				text := "no answer"
				if !same {
					text += " of " + strconv.Itoa(i)
				}
				f.Set(strconv.Itoa(i), away, errors.New(text))
			}
			if len(c.degraded) != 1 {
				t.Errorf("%s, same %t: %d calls as it comes", name, same, len(c.degraded))
			}
			for n, i := range order {
				if c.now() == "" {
					t.Fatalf("%s, same %t: over after %d of %d", name, same, n, parts)
				}
				f.Clear(strconv.Itoa(i))
			}
			most := 2
			if !same {
				most = 20 // the logarithm of parts, for a random order
			}
			if len(c.degraded) > most || c.now() != "" {
				t.Errorf("%s, same %t: %d calls, the last one %q", name, same, len(c.degraded), c.now())
			}
		}
	}
}

// Against a plain model in a random run: what is shown is the fault of a part
// that has it, one of each kind and in their order; and it changes only if it
// is not so any more, or a kind comes.
func TestFaultsModel(t *testing.T) {
	type fault struct {
		kind trouble
		text string
	}
	for seed := range uint64(50) {
		random := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // the same in each run
		c := &told{}
		f := NewFaults[trouble](c)
		model := map[string]fault{}
		shown := map[trouble]string{}
		for n := range 500 {
			part := fmt.Sprint("part", random.IntN(8))
			if random.IntN(2) == 0 {
				delete(model, part)
				f.Clear(part)
			} else {
				k := trouble(random.IntN(3))
				text := fmt.Sprintf("%c%d", 'A'+rune(k), random.IntN(4))
				model[part] = fault{k, text}
				f.Set(part, k, errors.New(text))
			}
			has := map[trouble][]string{}
			for _, m := range model {
				has[m.kind] = append(has[m.kind], m.text)
			}
			now := map[trouble]string{}
			var last trouble
			for text := range strings.SplitSeq(c.now(), "; ") {
				if text == "" {
					continue
				}
				k := trouble(text[0] - 'A')
				if k < last || now[k] != "" {
					t.Fatalf("seed %d, call %d: %q is out of order", seed, n, c.now())
				}
				last, now[k] = k, text
			}
			for k := range away + 3 {
				switch {
				case len(has[k]) == 0 && now[k] == "":
				case !slices.Contains(has[k], now[k]):
					t.Fatalf("seed %d, call %d: %q is shown of kind %d; parts have %q", seed, n, now[k], k, has[k])
				case now[k] != shown[k] && slices.Contains(has[k], shown[k]):
					t.Fatalf("seed %d, call %d: %q took the place of %q, which a part still has", seed, n, now[k], shown[k])
				}
			}
			shown = now
		}
		for i := 1; i < len(c.degraded); i++ {
			if c.degraded[i] == c.degraded[i-1] {
				t.Fatalf("seed %d: told %q twice", seed, c.degraded[i])
			}
		}
	}
}

// Parts may speak from any goroutine; calls to the catalog do not overlap, and
// the last one is the truth.
func TestFaultsConcurrently(t *testing.T) {
	c := &told{}
	f := NewFaults[trouble](c)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 500 {
				part := fmt.Sprint(g, "/", i%10)
				f.Set(part, trouble(i%3), fmt.Errorf("fault %d", i%7))
				if i%2 == 0 {
					f.Clear(part)
				}
			}
			for i := range 10 {
				f.Clear(fmt.Sprint(g, "/", i))
			}
		})
	}
	wg.Wait()
	if c.now() != "" {
		t.Errorf("%q is left", c.now())
	}
}
