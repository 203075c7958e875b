package record

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state/saved"
)

// endpoint is an instance in tests.
type endpoint struct{ Content }

// Tail implements Endpoint.
func (*endpoint) Tail() []byte { return nil }

func partOf(t testing.TB, coll, name string, spec proto.Message) *encode.Part {
	t.Helper()
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	p := &encode.Part{Collection: coll, Name: name, Metadata: encode.WithName(nil, name), Spec: b}
	if we, ok := spec.(*networking.WorkloadEntry); ok {
		p.Address = we.GetAddress()
	}
	p.Hash = encode.HashOf([]byte(p.Collection), p.Metadata, p.Spec)
	return p
}

func instanceOf(t testing.TB, name string, we *networking.WorkloadEntry) *endpoint {
	t.Helper()
	return &endpoint{Of(partOf(t, collection.WorkloadEntry, name, we))}
}

// A content has what its part had, keeps nothing of its memory, and is saved
// and read as it is.
func TestContent(t *testing.T) {
	p := partOf(t, collection.WorkloadEntry, "ns/web-1", &networking.WorkloadEntry{Address: "10.0.0.1", Weight: 3})
	p.OwnAddress = true
	metadata, spec := bytes.Clone(p.Metadata), bytes.Clone(p.Spec)
	c := Of(p)
	clear(p.Metadata)
	clear(p.Spec)
	c.Set(Derived, true)
	c.Set(OwnLabel, false)
	c.Seen, c.Marks = 7, 3
	want := func(what string, c *Content, traits Traits, seen uint32, marks uint8) {
		t.Helper()
		if c.Name() != "ns/web-1" || c.Namespace() != "ns" || c.Address() != "10.0.0.1" || c.Sum() != p.Hash || c.Size() != len(metadata)+len(spec) ||
			!bytes.Equal(c.Metadata(), metadata) || !bytes.Equal(c.Spec(), spec) || c.traits != traits || c.Seen != seen || c.Marks != marks {
			t.Errorf("%s: %+v", what, c)
		}
	}
	want("as it is", &c, OwnAddress|Derived, 7, 3)
	again := c.Copy()
	want("copied", &again, OwnAddress, 7, 0)
	var it saved.Item
	c.Save(&it)
	read := Saved(&it)
	want("saved", &read, OwnAddress, 0, 0)
	tomb := TombstoneOf("ns/gone")
	if tomb.Name() != "ns/gone" || !tomb.Is(Tombstone) || tomb.Is(Derived) || len(tomb.Spec()) > 0 {
		t.Errorf("a tombstone: %+v", tomb)
	}
}

// Over random runs a composition has the instances of a plain map, in order,
// shares what did not change with the one before, and counts by attributes what
// a look at all of them counts.
func TestCompositionModel(t *testing.T) {
	for seed := range uint64(3) {
		r := rand.New(rand.NewPCG(seed, 7))
		model := map[string]*endpoint{}
		c := &Composition[*endpoint]{Selector: "web"}
		for step := range 600 {
			before, changes := c, 1
			if step%50 == 0 {
				changes = 200
			}
			var added, removed []*endpoint
			for _, n := range r.Perm(400)[:changes] {
				name := fmt.Sprintf("ns/web-%d", n)
				if old := model[name]; old != nil {
					removed = append(removed, old)
					delete(model, name)
				}
				if r.IntN(3) > 0 {
					model[name] = instanceOf(t, name, &networking.WorkloadEntry{Address: fmt.Sprintf("10.0.%d.%d", r.IntN(4), r.IntN(100)), Weight: uint32(r.IntN(3))})
					added = append(added, model[name])
				}
			}
			c = c.With(added, removed)
			var got, want []string
			size, shared := 0, 0
			for _, b := range c.blocks {
				if len(b.records) == 0 || len(b.records) > blockSize {
					t.Fatalf("a block of %d", len(b.records))
				}
				if n := len(b.append(nil)); n != b.size || !bytes.Equal(b.encoded(), b.append(nil)) {
					t.Fatalf("a block of %d bytes says %d", n, b.size)
				}
				size += b.size
				if slices.Contains(before.blocks, b) {
					shared++
				}
			}
			for e := range c.All() {
				got = append(got, e.Address()+" "+e.Name())
				if !slices.Contains(c.At(e.Address()), e) {
					t.Fatalf("%s is not at its address", e.Name())
				}
			}
			for name, e := range model {
				want = append(want, e.Address()+" "+name)
			}
			slices.Sort(want)
			if !slices.Equal(got, want) || c.Len() != len(want) || c.size != size {
				t.Fatalf("seed %d step %d: %d of %d bytes, want %d of %d:\n%q\n%q", seed, step, c.Len(), c.size, len(want), size, got, want)
			}
			if changes == 1 && len(c.blocks)-shared > 3 {
				t.Fatalf("one change made %d of %d blocks anew", len(c.blocks)-shared, len(c.blocks))
			}
			if sum, exceptions, several := plainly(model); c.sum != sum || c.exceptions() != exceptions || c.sharesAddress() != several {
				t.Fatalf("seed %d step %d: sum %s, exceptions %s, shared %v; want %s, %s, %v", seed, step, c.sum, c.exceptions(), c.sharesAddress(), sum, exceptions, several)
			}
		}
		// Another order of changes gives the same bytes.
		again := new(Composition[*endpoint])
		for _, e := range model {
			again = again.With([]*endpoint{e}, nil)
		}
		if a, b := encodingOf(t, c, encode.Form{}), encodingOf(t, again, encode.Form{}); a.Version != b.Version || !bytes.Equal(a.Append(nil), b.Append(nil)) {
			t.Errorf("seed %d: another order of changes gives other bytes", seed)
		}
	}
}

// plainly returns the sum of instances, that of the exceptions, and whether two
// have one address.
func plainly(all map[string]*endpoint) (sum, exceptions encode.Hash, several bool) {
	at := map[string]int{}
	for _, e := range all {
		sum += e.Sum()
		at[e.Address()]++
	}
	counts, sums := map[encode.Hash]int{}, map[encode.Hash]encode.Hash{}
	for _, e := range all {
		if several = several || at[e.Address()] > 1; at[e.Address()] == 1 {
			attributes := encode.Attributes(e.Spec())
			counts[attributes]++
			sums[attributes] += e.Sum()
		}
	}
	ordinary, most := encode.Hash(0), 0
	for _, attributes := range slices.Sorted(maps.Keys(counts)) {
		if counts[attributes] > most {
			ordinary, most = attributes, counts[attributes]
		}
	}
	return sum, sum - sums[ordinary] + ordinary, several
}

// encodingOf returns a ServiceEntry with endpoints in a form.
func encodingOf(t testing.TB, c *Composition[*endpoint], f encode.Form) Encoding[*endpoint] {
	t.Helper()
	content := Of(partOf(t, collection.ServiceEntry, "ns/web", &networking.ServiceEntry{Hosts: []string{"web.example.org"}}))
	r := Resource[*endpoint]{Content: &content, Parts: c, URL: "type.googleapis.com/istio.networking.v1alpha3.ServiceEntry", IsEntry: true, Registry: "dc1"}
	return r.Encode(encode.NewLayout(f))
}

// What is appended and what is sent in segments are the same bytes, whatever
// the size, and say the version.
func TestSegments(t *testing.T) {
	for _, n := range []int{0, 1, 3, 70, 2000} {
		c := &Composition[*endpoint]{Selector: "web"}
		var all []*endpoint
		for i := range n { // two of each address
			all = append(all, instanceOf(t, fmt.Sprintf("ns/web-%d", i), &networking.WorkloadEntry{Address: fmt.Sprintf("10.0.%d.%d", i>>9, i>>1&255), Ports: map[string]uint32{"http": uint32(8000 + i)}}))
		}
		c = c.With(all, nil)
		for _, f := range []encode.Form{{}, {Shape: encode.Workload}, {Registry: true}, {PortSets: true}, {EndpointsHash: true}} {
			e := encodingOf(t, c, f)
			b := e.Append(nil)
			segments := e.Segments(nil)
			var res mcp.Resource
			if err := proto.Unmarshal(b, &res); err != nil {
				t.Fatal(err)
			}
			var se networking.ServiceEntry
			if err := res.GetBody().UnmarshalTo(&se); err != nil {
				t.Fatal(err)
			}
			want := n
			if f.Shape == encode.Workload {
				want = 0
			}
			if len(b) != e.Size || !bytes.Equal(b, bytes.Join(segments, nil)) || res.GetMetadata().GetVersion() != e.Version.String() || len(se.GetEndpoints()) != want {
				t.Errorf("%d endpoints, form %s: %d bytes, said are %d; %d endpoints in version %s", n, f, len(b), e.Size, len(se.GetEndpoints()), res.GetMetadata().GetVersion())
			}
			if shared := len(segments) > 2; n == 2000 && want > 0 && !f.PortSets && !shared {
				t.Errorf("form %s: a large service is copied", f)
			}
			if has := strings.Contains(string(b), encode.PortsLabel); has != (f.PortSets && n > 1) {
				t.Errorf("%d endpoints, form %s: a label of ports: %v", n, f, has)
			}
		}
	}
}
