package kubernetes

import (
	"bytes"
	"encoding/json"
	"fmt"
	"iter"
	"maps"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	mcp "istio.io/api/mcp/v1alpha1"
	_ "istio.io/api/networking/v1alpha3" // registers the messages of objects
	_ "istio.io/api/networking/v1beta1"
	_ "istio.io/api/security/v1beta1"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// revisionLabel is the label by which a resource is for one istiod.
const revisionLabel = "istio.io/rev"

// objects is what the cluster has of Istio's kinds: an object is a service with
// one instance, which is the object. So what is believed of a listing is the
// same as for services. It is used by one goroutine at a time.
type objects struct {
	*Adapter
	found   []source
	leftOut plugin.Unselected
	objects map[registry.Key]string
	rev     map[registry.Key]bool // of another revision
}

func newObjects(a *Adapter, found []source) *objects {
	return &objects{Adapter: a, found: found, objects: map[registry.Key]string{}, rev: map[registry.Key]bool{}}
}

// sources implements follower.
func (o *objects) sources() []source { return o.found }

// kept is what is kept of an object.
type kept struct {
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
	Created     string            `json:"created,omitempty"`
	Spec        json.RawMessage   `json:"spec,omitempty"`
}

// ofKubectl is an annotation that repeats the object.
const ofKubectl = "kubectl.kubernetes.io/last-applied-configuration"

// read implements follower.
func (*objects) read(_ string, o *object) {
	if o.raw == nil {
		return
	}
	var x struct {
		Metadata metadata        `json:"metadata"`
		Spec     json.RawMessage `json:"spec"`
	}
	err := json.Unmarshal(o.raw, &x)
	m := x.Metadata
	delete(m.Annotations, ofKubectl)
	v := istioObject{rev: m.Labels[revisionLabel]}
	if err == nil {
		var b []byte
		b, err = json.Marshal(kept{Labels: m.Labels, Annotations: m.Annotations, Created: m.Created, Spec: x.Spec})
		v.text = string(b)
	}
	if err != nil {
		v.text = string(o.raw) // publish finds the same
	}
	o.raw, o.value = nil, v
}

// istioObject is an object, read: kept in JSON.
type istioObject struct{ text, rev string }

// put implements follower.
func (o *objects) put(kind string, x *object, touched map[registry.Key]bool) {
	n := x.name()
	v, ok := x.value.(istioObject)
	if !ok || n.name == "" || n.namespace == "" {
		return // of no server
	}
	key := registry.Key{Group: kind, Namespace: n.namespace, Name: n.name}
	if was, ok := o.objects[key]; ok && was == v.text {
		return
	}
	touched[key] = true
	delete(o.objects, key)
	delete(o.rev, key)
	if v.rev != "" && o.config.Revision != "" && v.rev != o.config.Revision {
		o.rev[key] = true
		return
	}
	if o.leftOut.Match(o.config.Select, n.String()) {
		o.objects[key] = v.text
	}
}

// remove implements follower.
func (o *objects) remove(kind string, n name, touched map[registry.Key]bool) {
	key := registry.Key{Group: kind, Namespace: n.namespace, Name: n.name}
	delete(o.objects, key)
	delete(o.rev, key)
	o.leftOut.Forget(n.String())
	touched[key] = true
}

// all implements follower.
func (o *objects) all() plugin.Listing {
	l := o.changed(maps.Keys(o.objects))
	l.Complete = true
	return l
}

// changed implements follower.
func (o *objects) changed(keys iter.Seq[registry.Key]) (l plugin.Listing) {
	for key := range keys {
		if text, ok := o.objects[key]; ok {
			l.Services = append(l.Services, plugin.Snapshot{
				Service:   registry.Service{Key: key},
				Instances: []registry.Instance{{ID: key.Name, Meta: map[string]string{inMeta: text}}},
			})
		} else {
			l.Removed = append(l.Removed, key)
		}
	}
	return l
}

// tell implements follower.
func (o *objects) tell(catalog plugin.Catalog) {
	o.leftOut.Tell(catalog, "select", "")
	text := ""
	if n := len(o.rev); n > 0 {
		text = fmt.Sprintf("%d resources are of another revision than config.revision", n)
	}
	catalog.LeftOut("config.revision", text)
}

// identity implements follower.
func (o *objects) identity() string { return "" }

// inMeta is the key under which an instance has its object.
const inMeta = "object"

// publisher is a catalog that publishes what it is told: see objects.
type publisher struct {
	plugin.Publisher

	mu    sync.Mutex // guards noted
	noted map[registry.Key]bool
}

// Set implements plugin.Catalog.
func (p *publisher) Set(svc registry.Service, instances []registry.Instance) {
	if len(instances) == 0 {
		return // a service that Grace keeps always has its instance
	}
	res, note := resource(svc.Key, instances[0].Meta[inMeta])
	if len(instances) > 1 && note == "" {
		note = "several contexts have it, of which the first is published; leave it out of the others by select, or make a registry of each context"
	}
	p.note(svc.Key, note)
	p.Publish(res)
}

// Remove implements plugin.Catalog.
func (p *publisher) Remove(key registry.Key) {
	p.note(key, "")
	p.Withdraw(key.Group, key.Namespace+"/"+key.Name)
}

// note lists what is wrong with an object, or nothing.
func (p *publisher) note(key registry.Key, text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if text == "" && !p.noted[key] {
		return
	}
	p.Problem(key.String(), text)
	if text == "" {
		delete(p.noted, key)
		return
	}
	if p.noted == nil {
		p.noted = map[registry.Key]bool{}
	}
	p.noted[key] = true
}

// resource returns an object as Istio has it on the wire, and what is wrong
// with it. One whose spec cannot be read has a body that nobody can read: the
// bridge keeps the last good one then.
func resource(key registry.Key, text string) (_ *mcp.Resource, note string) {
	group, kind, _ := strings.Cut(key.Group, "/")
	_, message := collection.OfKind(group+"/v1", kind)
	res := &mcp.Resource{
		Metadata: &mcp.Metadata{Name: key.Namespace + "/" + key.Name},
		Body:     &anypb.Any{TypeUrl: "type.googleapis.com/" + message, Value: []byte{0xff}},
	}
	var o kept
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return res, fmt.Sprintf("it is not an object: %v", err)
	}
	res.Metadata.Labels, res.Metadata.Annotations = o.Labels, o.Annotations
	if created, err := time.Parse(time.RFC3339, o.Created); err == nil {
		// By which Istio decides between resources that contradict each other.
		res.Metadata.CreateTime = timestamppb.New(created)
	}
	mt, err := protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName(message))
	if err != nil {
		panic("BUG: a collection without its message: " + err.Error())
	}
	spec := bytes.TrimSpace(o.Spec)
	if len(spec) == 0 || string(spec) == "null" {
		spec = []byte("{}")
	}
	body := mt.New().Interface()
	if err := protojson.Unmarshal(spec, body); err != nil {
		// What the server has taken and Isthmus does not know is of a newer
		// Istio.
		body = mt.New().Interface()
		if again := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(spec, body); again != nil {
			return res, fmt.Sprintf("its spec: %s; what it was before is kept", plugin.Excerpt(again.Error()))
		}
		note = fmt.Sprintf("its spec has what this version of Isthmus does not know, and is published without that: %s", plugin.Excerpt(err.Error()))
	}
	res.Body = &anypb.Any{}
	if err := anypb.MarshalFrom(res.Body, body, proto.MarshalOptions{Deterministic: true}); err != nil {
		res.Body = &anypb.Any{TypeUrl: "type.googleapis.com/" + message, Value: []byte{0xff}}
		return res, fmt.Sprintf("its spec: %v; what it was before is kept", err)
	}
	return res, note
}
