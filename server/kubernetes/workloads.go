package kubernetes

import (
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"strings"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	networking "istio.io/api/networking/v1alpha3"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	kjson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/state"
)

// WorkloadLabel joins the WorkloadEntries of [Workloads] to their ServiceEntry.
// It is not the label by which those of the bridge's sinks are joined, so that
// neither takes the other's.
const WorkloadLabel = "isthmus.io/workload-of"

// workloadSuffix is what the names of objects end in, as that of a stub does.
const workloadSuffix = ".isthmus"

// Workloads says how ServiceEntries and their WorkloadEntries are made, for
// ambient without a waypoint: ztunnel connects to the instances itself.
type Workloads struct {
	Meta
}

// Reads implements [Maker]: instances count.
func (w *Workloads) Reads() state.Kind { return (*Services)(nil).Reads() }

func (w *Workloads) kinds() []kind { return []kind{serviceEntries, workloadEntries} }

// Plan implements [Maker].
func (w *Workloads) Plan(r *state.Record) Plan {
	e, err := entryOf(r)
	if err != nil {
		return Plan{Without: map[string]string{r.Name(): err.Error()}}
	}
	return w.plan(e)
}

func (w *Workloads) plan(e *entry) Plan {
	p, err := w.objects(e)
	if err != nil {
		return Plan{Without: map[string]string{e.namespace + "/" + e.name: err.Error()}}
	}
	return p
}

func (w *Workloads) objects(e *entry) (Plan, error) {
	of := e.name
	if len(validation.IsValidLabelValue(of)) > 0 {
		sum := sha256.Sum256([]byte(of))
		of = hex.EncodeToString(sum[:8])
	}
	if err := visible(e.spec); err != nil {
		return Plan{}, err
	}
	e.spec.WorkloadSelector = &networking.WorkloadSelector{Labels: map[string]string{WorkloadLabel: of}}
	service := serviceEntries.new(e.namespace, suffixed(e.name, workloadSuffix))
	var err error
	if service.Object["spec"], err = fieldsOf(e.spec); err != nil {
		return Plan{}, err
	}
	if err := w.finish(service, nil, nil); err != nil {
		return Plan{}, err
	}
	p := Plan{Objects: []*unstructured.Unstructured{service}, Without: map[string]string{}}
	annotations := map[string]string{HostAnnotation: e.host()}
	for i := range e.instances {
		in := &e.instances[i]
		address, err := in.routable()
		if err != nil {
			p.Without[in.name] = err.Error()
			continue
		}
		own := proto.CloneOf(in.WorkloadEntry)
		own.Address = address.String()
		labels := joined(own.GetLabels(), map[string]string{WorkloadLabel: of})
		delete(labels, encode.SelectorLabel)
		own.Labels = labels
		_, name, _ := strings.Cut(in.name, "/")
		o := workloadEntries.new(e.namespace, suffixed(name, workloadSuffix))
		if o.Object["spec"], err = fieldsOf(own); err != nil {
			return Plan{}, err
		}
		// ztunnel's services select by the labels of the object.
		valid := maps.Clone(labels)
		maps.DeleteFunc(valid, func(key, value string) bool {
			return len(validation.IsQualifiedName(key))+len(validation.IsValidLabelValue(value)) > 0
		})
		if err := w.finish(o, valid, annotations); err != nil {
			return Plan{}, err
		}
		p.Objects = append(p.Objects, o)
	}
	return p, nil
}

// fieldsOf returns a message as Kubernetes has it.
func fieldsOf(m proto.Message) (fields map[string]any, err error) {
	text, err := protojson.Marshal(m)
	if err == nil {
		err = kjson.Unmarshal(text, &fields)
	}
	if s, ok := m.(*networking.ServiceEntry); ok && err == nil {
		fields["location"] = s.GetLocation().String() // also the default, which JSON omits
	}
	return fields, err
}
