package server

import (
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/isthmus-mesh/isthmus/plugin/collection"
	"github.com/isthmus-mesh/isthmus/server/encode"
	"github.com/isthmus-mesh/isthmus/server/kubernetes"
	"github.com/isthmus-mesh/isthmus/server/state"
)

// Stubs returns the stubs of all services, sorted by namespace and name, and
// the services that have none with the reason.
func (s *Server) Stubs(of *kubernetes.Stub) (stubs []*unstructured.Unstructured, without []Problem, err error) {
	l := encode.NewLayout(kubernetes.StubForm)
	for c := range s.view.Changes(state.Kind{Collection: collection.ServiceEntry, Shape: l.Shape}, new(state.Cursor)) {
		entry, err := decode(c.Record, l)
		if err != nil {
			return nil, nil, err
		}
		stub, err := of.Object(entry)
		if err != nil {
			without = append(without, Problem{c.Record.Registry(), state.Problem{ID: "stub of " + c.Name, Reason: err.Error()}})
			continue
		}
		stubs = append(stubs, stub)
	}
	slices.SortFunc(stubs, func(a, b *unstructured.Unstructured) int {
		return strings.Compare(a.GetNamespace()+"/"+a.GetName(), b.GetNamespace()+"/"+b.GetName())
	})
	slices.SortFunc(without, func(a, b Problem) int { return strings.Compare(a.ID, b.ID) })
	return stubs, without, nil
}
