package saved

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
)

const (
	entryURL    = "type.googleapis.com/istio.networking.v1alpha3.ServiceEntry"
	workloadURL = "type.googleapis.com/istio.networking.v1alpha3.WorkloadEntry"
	ruleURL     = "type.googleapis.com/istio.networking.v1alpha3.DestinationRule"
)

var items = []Item{
	{Registry: 1, Kind: Entry, Collection: collection.ServiceEntry, URL: entryURL, Traits: 3, Hash: 1 << 60, SpecAt: 4, NameAt: 0, NameLen: 4, AddressAt: 4, Buf: "ns/aspec"},
	{Registry: 2, Kind: Entry, More: true, Collection: collection.ServiceEntry, URL: entryURL, Hash: 7, SpecAt: 4, NameLen: 4, AddressAt: 8, Buf: "ns/aspec"},
	{Kind: Instance, Service: "ns/a", Collection: collection.WorkloadEntry, URL: workloadURL, Hash: 9, SpecAt: 5, NameAt: 1, NameLen: 4, AddressAt: 7, AddressLength: 2, Buf: "-ns/bxx10"},
	{Kind: Instance, Service: "ns/a", Collection: collection.WorkloadEntry, URL: workloadURL, Hash: 9, SpecAt: 4, NameLen: 4, AddressAt: 4, Buf: "ns/c"},
	{Kind: Removal, Collection: "c", Name: "ns/d"},
	{Registry: 1<<16 - 2, Kind: Plain, Collection: collection.DestinationRule, URL: ruleURL, Hash: 10, SpecAt: 4, NameLen: 1, AddressAt: 4, Buf: "ns/e"},
	{Kind: Instance, Service: "ns/f", Collection: collection.WorkloadEntry, URL: workloadURL, Hash: 9, SpecAt: 4, NameLen: 4, AddressAt: 4, Buf: "ns/g"},
}

func parse(run []byte) (out []Item, err error) {
	err = Parse(run, func(it *Item) error {
		out = append(out, *it)
		return nil
	})
	return out, err
}

// Items come back as they were.
func TestRoundTrip(t *testing.T) {
	var run []byte
	for i := range items {
		run = items[i].Append(run)
	}
	got, err := parse(run)
	if d := cmp.Diff(items, got); d != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, d)
	}
	clear(run)
	if d := cmp.Diff(items, got); d != "" {
		t.Errorf("items share memory with the run:\n%s", d)
	}
}

// A run that ends early is malformed, except between two items.
func TestTruncated(t *testing.T) {
	var run []byte
	ends := map[int]int{0: 0} // items by length
	for i := range items {
		run = items[i].Append(run)
		ends[len(run)] = i + 1
	}
	for n := range run {
		got, err := parse(run[:n])
		if whole, between := ends[n]; between != (err == nil) || between && len(got) != whole {
			t.Errorf("%d bytes: %d items, error %v", n, len(got), err)
		}
	}
}

// What would be out of the buffer, or contradicts itself, is malformed.
func TestMalformed(t *testing.T) {
	good := Item{Kind: Plain, URL: ruleURL, SpecAt: 3, NameAt: 1, NameLen: 2, AddressAt: 3, AddressLength: 1, Buf: "abcd"}
	if _, err := parse(good.Append(nil)); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*Item){
		"a spec":                func(it *Item) { it.SpecAt, it.AddressAt, it.AddressLength = 5, 5, 0 },
		"a name":                func(it *Item) { it.NameAt = 3 },
		"no name":               func(it *Item) { it.NameLen = 0 },
		"an address":            func(it *Item) { it.AddressLength = 2 },
		"an address in no spec": func(it *Item) { it.AddressAt = 2 },
		"a registry":            func(it *Item) { it.Registry = 1<<16 - 1 },
		"a kind":                func(it *Item) { it.Kind = 8 },
		"a body":                func(it *Item) { it.URL = "type.googleapis.com/google.protobuf.Any" },
		"an entry":              func(it *Item) { it.Kind = Entry },
		"an instance":           func(it *Item) { it.Kind, it.URL = Instance, entryURL },
		"a further removal":     func(it *Item) { *it = Item{Kind: Removal, More: true, Collection: "c", Name: "n"} },
	} {
		it := good
		change(&it)
		if _, err := parse(it.Append(nil)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: error %v", name, err)
		}
	}
	stop := errors.New("stop")
	for _, it := range []Item{good, {Kind: Removal, Collection: "c", Name: "n"}} {
		if err := Parse(it.Append(nil), func(*Item) error { return stop }); !errors.Is(err, stop) {
			t.Errorf("error %v, want that of the caller", err)
		}
	}
}

// Any bytes are an error or items that are written the same again.
func FuzzParse(f *testing.F) {
	var run []byte
	for i := range items {
		run = items[i].Append(run)
	}
	f.Add(run)
	f.Fuzz(func(t *testing.T, run []byte) {
		got, err := parse(run)
		if err != nil {
			return
		}
		var again []byte
		for i := range got {
			again = got[i].Append(again)
		}
		same, err := parse(again)
		if d := cmp.Diff(got, same, cmpopts.EquateEmpty()); d != "" || err != nil {
			t.Errorf("%v (-first +second):\n%s", err, d)
		}
	})
}
