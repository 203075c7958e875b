package kubernetes

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"

	"google.golang.org/protobuf/proto"
	mcp "istio.io/api/mcp/v1alpha1"
	networking "istio.io/api/networking/v1alpha3"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state"
)

// Labels and annotations of objects.
const (
	// ConsumerLabel names the consumer that an object belongs to.
	ConsumerLabel = "isthmus.io/consumer"
	// HashAnnotation is a hash of the rest of the object as it was made.
	HashAnnotation = "isthmus.io/hash"
	// HostAnnotation is the first host of the service, of objects that do not
	// have it otherwise.
	HostAnnotation = "isthmus.io/host"
	// WaypointLabel and WaypointNamespaceLabel name the waypoint of a service.
	WaypointLabel          = "istio.io/use-waypoint"
	WaypointNamespaceLabel = "istio.io/use-waypoint-namespace"
)

// StubForm is the form of the ServiceEntries that [Stub.Object] reads: without
// endpoints, and with the address that istiods have.
var StubForm = encode.Form{Shape: encode.Workload, Address: true}

var stubLayout = encode.NewLayout(StubForm)

// Errors of [Stub.Object].
var (
	errNoEntry   = errors.New("it is no ServiceEntry")
	errNoAddress = errors.New("it has no address, by which ztunnel finds a service")
)

// Meta is what all objects of a consumer have.
type Meta struct {
	// Consumer is the value of [ConsumerLabel].
	Consumer string
	// Labels and Annotations are those of objects besides their own.
	Labels, Annotations map[string]string
}

func (m *Meta) consumer() string { return m.Consumer }

// finish adds labels, annotations and hash to an object, which has nothing else
// to come.
func (m *Meta) finish(o *unstructured.Unstructured, labels, annotations map[string]string) error {
	labels, annotations = joined(m.Labels, labels), joined(m.Annotations, annotations)
	labels[ConsumerLabel] = m.Consumer
	o.SetLabels(labels)
	o.SetAnnotations(annotations)
	text, err := json.Marshal(o.Object) // sorts keys
	if err != nil {
		return err
	}
	sum := sha256.Sum256(text)
	annotations[HashAnnotation] = hex.EncodeToString(sum[:8])
	o.SetAnnotations(annotations)
	return nil
}

// joined returns the pairs of both, of the second one for keys of both.
func joined(a, b map[string]string) map[string]string {
	out := make(map[string]string, len(a)+len(b)+1)
	maps.Copy(out, a)
	maps.Copy(out, b)
	return out
}

// Stub says how stubs are made.
type Stub struct {
	Meta
	// Waypoint is the name of the waypoint's Gateway.
	Waypoint string
	// WaypointNamespace is its namespace, "" for that of the service.
	WaypointNamespace string
}

// stubSuffix is what the name of a stub ends in. With the name of the
// ServiceEntry that istiod has by xDS, istiod would have one of the two only.
const stubSuffix = ".isthmus-stub"

// maxObjectName is the length of the longest name of an object (RFC 1123).
const maxObjectName = 253

// suffixed returns a name with a suffix, shortened to what Kubernetes takes.
func suffixed(name, suffix string) string {
	if most := maxObjectName - len(suffix); len(name) > most {
		sum := sha256.Sum256([]byte(name))
		digits := "-" + hex.EncodeToString(sum[:8])
		name = strings.TrimRight(name[:most-len(digits)], "-.") + digits
	}
	return name + suffix
}

// Object returns the stub of a ServiceEntry of [StubForm]. It is a pure
// function. The error says why a service has no stub.
//
// What istiod compares of two ServiceEntries of a host is equal in both: host,
// address, ports, location, exportTo and subjectAltNames.
func (s *Stub) Object(entry *mcp.Resource) (*unstructured.Unstructured, error) {
	body, err := entry.GetBody().UnmarshalNew()
	if err != nil {
		return nil, err
	}
	spec, ok := body.(*networking.ServiceEntry)
	if !ok {
		return nil, errNoEntry
	}
	if err := visible(spec); err != nil {
		return nil, err
	}
	spec.Endpoints, spec.WorkloadSelector = nil, nil
	fields, err := fieldsOf(spec)
	if err != nil {
		return nil, err
	}
	own := map[string]string{WaypointLabel: s.Waypoint}
	if s.WaypointNamespace != "" {
		own[WaypointNamespaceLabel] = s.WaypointNamespace
	}
	namespace, name, _ := strings.Cut(entry.GetMetadata().GetName(), "/")
	o := serviceEntries.new(namespace, suffixed(name, stubSuffix))
	o.Object["spec"] = fields
	err = s.finish(o, own, nil)
	return o, err
}

// visible reports why ztunnel cannot have a service, nil if it can.
func visible(spec *networking.ServiceEntry) error {
	for _, host := range spec.GetHosts() {
		if strings.Contains(host, "*") {
			return fmt.Errorf("its host %s is a pattern, which has no address", host)
		}
	}
	switch {
	case spec.GetResolution() != networking.ServiceEntry_STATIC:
		return fmt.Errorf("its resolution is %s; objects are for instances that are addresses (STATIC)", spec.GetResolution())
	case len(spec.GetAddresses()) == 0:
		return errNoAddress
	}
	return nil
}

// ObjectOf is [Stub.Object] for a record of the state.
func (s *Stub) ObjectOf(r *state.Record) (*unstructured.Unstructured, error) {
	entry, e := new(mcp.Resource), r.Encode(stubLayout)
	if err := proto.Unmarshal(e.Append(nil), entry); err != nil {
		return nil, err
	}
	return s.Object(entry)
}

// Reads implements [Maker]: a change of an instance is none.
func (s *Stub) Reads() state.Kind {
	return state.Kind{Collection: collection.ServiceEntry, Shape: StubForm.Shape}
}

func (s *Stub) kinds() []kind { return []kind{serviceEntries} }

// Plan implements [Maker].
func (s *Stub) Plan(r *state.Record) Plan {
	o, err := s.ObjectOf(r)
	if err != nil {
		return Plan{Without: map[string]string{r.Name(): err.Error()}}
	}
	return Plan{Objects: []*unstructured.Unstructured{o}}
}
