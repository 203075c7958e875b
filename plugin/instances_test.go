package plugin

import (
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// No field of an instance can change without being noticed, those included that
// are added to registry.Instance later.
func TestEqualInstancesSeesEveryField(t *testing.T) {
	full := func() registry.Instance {
		return registry.Instance{ID: "i", Address: "a", Ports: []registry.Port{{Number: 1}}, Meta: map[string]string{"k": "v"}, Tags: []string{"t"}, Weight: new(1.0)}
	}
	if !EqualInstances([]registry.Instance{full()}, []registry.Instance{full()}) {
		t.Error("equal instances are called different")
	}
	for i := range reflect.TypeFor[registry.Instance]().NumField() {
		changed := full()
		field := reflect.ValueOf(&changed).Elem().Field(i)
		name := reflect.TypeFor[registry.Instance]().Field(i).Name
		switch field.Kind() {
		case reflect.String:
			field.SetString("other")
		case reflect.Bool:
			field.SetBool(true)
		case reflect.Uint8:
			field.SetUint(3)
		case reflect.Struct:
			field.Field(0).SetString("other")
		default:
			field.SetZero()
		}
		if EqualInstances([]registry.Instance{full()}, []registry.Instance{changed}) {
			t.Errorf("a change of %s goes unnoticed", name)
		}
	}
}

// What is missing is kept as it was, in order; what is there is taken as it is;
// neither list is changed.
func TestUnionInstances(t *testing.T) {
	i := func(id, address string) registry.Instance { return registry.Instance{ID: id, Address: address} }
	list := func(of ...registry.Instance) []registry.Instance {
		return append(make([]registry.Instance, 0, 8), of...)
	}
	known, next := list(i("a", "old"), i("b", "old"), i("d", "old")), list(i("b", "new"), i("c", "new"))
	got, added := UnionInstances(next, known)
	if diff := cmp.Diff(list(i("a", "old"), i("b", "new"), i("c", "new"), i("d", "old")), got); diff != "" || added != 2 {
		t.Errorf("%d added, want 2; all (-want +got):\n%s", added, diff)
	}
	if got, added := UnionInstances(known, known); added != 0 || !EqualInstances(got, known) {
		t.Errorf("%d added of itself: %v", added, got)
	}
	if got, added := UnionInstances(nil, known); added != 3 || !EqualInstances(got, known) {
		t.Errorf("%d added to nothing: %v", added, got)
	}
	if !EqualInstances(next, list(i("b", "new"), i("c", "new"))) || !EqualInstances(known, list(i("a", "old"), i("b", "old"), i("d", "old"))) {
		t.Errorf("the lists have become %v and %v", next, known)
	}
}
