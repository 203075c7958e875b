package message

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	networking "istio.io/api/networking/v1alpha3"

	"github.com/isthmus-mesh/isthmus/internal/testresource"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

var reader = Reader{
	Valid: func(*encode.Part, proto.Message) error { return nil },
	Selector: func(service string) (string, []byte) {
		return service, encode.AppendLabel(nil, encode.SelectorLabel, service)
	},
}

func instance(service, name string, labels map[string]string) *pluginv1.Upsert {
	return &pluginv1.Upsert{Service: service, Resource: testresource.Encode(testresource.Named(name), &networking.WorkloadEntry{Address: "10.0.0.1", Labels: labels})}
}

// An instance without the label of its service has the hash of one with it, in
// front of whatever other instances it is sent.
func TestLabelIsHashed(t *testing.T) {
	own := map[string]string{encode.SelectorLabel: "ns/web"}
	got, err := reader.Read(&pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{
		instance("ns/web", "ns/1", nil), instance("ns/api", "ns/2", own), instance("ns/web", "ns/3", own), instance("", "ns/4", nil),
	}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for n, added := range []bool{true, true, false, false} {
		p := got[n].Part
		if without := encode.HashOf([]byte(p.Collection), p.Metadata, p.Spec); (p.Hash != without) != added {
			t.Errorf("upsert %d has the hash %v, and %v without a label", n, p.Hash, without)
		}
		if got[n].IsInstance() != (n < 3) {
			t.Errorf("upsert %d: instance %v", n, got[n].IsInstance())
		}
	}
}

type owner struct{}

func (owner) Check(p *encode.Part, _ proto.Message) error {
	if strings.HasSuffix(p.Name, "/foreign") {
		return errors.New("not yours")
	}
	return nil
}

// What is not the registry's is refused with the reason of its owner, and what
// does not decode as far as it is legible; neither ends the message.
func TestRefused(t *testing.T) {
	got, err := reader.Read(&pluginv1.WatchResponse{Upserts: []*pluginv1.Upsert{
		instance("ns/web", "ns/foreign", nil), instance("ns/web", "ns/mine", nil), {Resource: []byte("?")},
	}}, owner{})
	if err != nil {
		t.Fatal(err)
	}
	if foreign, ok := errors.AsType[*ForeignError](got[0].Err); !ok || foreign.Unwrap().Error() != "not yours" {
		t.Errorf("error %v", got[0].Err)
	}
	if coll, name := got[0].ID(); coll != collection.WorkloadEntry || name != "ns/foreign" || got[0].IsInstance() {
		t.Errorf("%s %s", coll, name)
	}
	if got[1].Err != nil || got[1].IsNameless() {
		t.Errorf("error %v", got[1].Err)
	}
	if got[2].Err == nil || !got[2].IsNameless() {
		t.Errorf("error %v", got[2].Err)
	}
}

// A message that names a resource twice breaks the contract, wherever it does.
func TestNamesOnce(t *testing.T) {
	const web = "ns/web"
	parts := map[string]func(*pluginv1.WatchResponse){
		"upserts": func(m *pluginv1.WatchResponse) { m.Upserts = append(m.Upserts, instance("ns/s", web, nil)) },
		"removals": func(m *pluginv1.WatchResponse) {
			m.Removals = append(m.Removals, &pluginv1.Removal{Collection: collection.WorkloadEntry, Name: web})
		},
		"kept": func(m *pluginv1.WatchResponse) {
			m.Kept = append(m.Kept, &pluginv1.Kept{Collection: collection.WorkloadEntry, Name: web})
		},
	}
	for first, a := range parts {
		for second, b := range parts {
			m := &pluginv1.WatchResponse{}
			a(m)
			if _, err := reader.Read(m, nil); err != nil {
				t.Errorf("%s alone: %v", first, err)
			}
			b(m)
			if _, err := reader.Read(m, nil); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("%q", web)) {
				t.Errorf("%s and %s: error %v", first, second, err)
			}
		}
	}
	kept := &pluginv1.WatchResponse{Kept: []*pluginv1.Kept{{Collection: collection.ServiceEntry, Name: web}}, Relisted: []string{web}}
	if _, err := reader.Read(kept, nil); err == nil {
		t.Error("a service is kept and relisted")
	}
}
