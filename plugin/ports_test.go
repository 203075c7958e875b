package plugin

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Ports of metadata come behind those of the instance, each number once; what
// is not a number is described with the first such value.
func TestPortKeys(t *testing.T) {
	keys := PortKeys{{Name: "grpc", Key: "gRPC_port", Protocol: "grpc"}, {Name: "admin", Key: "admin"}}
	own := []registry.Port{{Number: 80}}
	for _, test := range []struct {
		meta map[string]string
		want []registry.Port
		bad  int
	}{
		{nil, own, 0},
		{map[string]string{"gRPC_port": "90", "admin": "91", "other": "x"}, []registry.Port{{Number: 80}, {Name: "grpc", Number: 90, Protocol: "grpc"}, {Name: "admin", Number: 91}}, 0},
		{map[string]string{"gRPC_port": "80", "admin": "80"}, own, 0},
		{map[string]string{"gRPC_port": "90", "admin": "90"}, []registry.Port{{Number: 80}, {Name: "grpc", Number: 90, Protocol: "grpc"}}, 0},
		{map[string]string{"gRPC_port": "", "admin": "65536"}, own, 2},
		{map[string]string{"gRPC_port": "0"}, own, 1},
		{map[string]string{"gRPC_port": "-1"}, own, 1},
		{map[string]string{"gRPC_port": "http"}, own, 1},
	} {
		got := keys.Append(slices.Clone(own), test.meta)
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%v (-want +got):\n%s", test.meta, diff)
		}
		problem := keys.Problem([]registry.Instance{{ID: "a"}, {ID: "b", Meta: test.meta}})
		if (problem == "") != (test.bad == 0) || test.bad > 0 && !strings.HasPrefix(problem, "instance b has ") || strings.Contains(problem, "1 more like it") != (test.bad == 2) {
			t.Errorf("%v: problem %q", test.meta, problem)
		}
	}
	var fields []string
	for _, err := range (PortKeys{{}, {Name: "a", Key: "k"}, {Name: "a", Key: "l"}}).Check("ports") {
		if e, ok := errors.AsType[*FieldError](err); ok {
			fields = append(fields, e.Field)
		}
	}
	if diff := cmp.Diff([]string{"ports[0].name", "ports[0].key", "ports[2].name"}, fields); diff != "" {
		t.Errorf("fields (-want +got):\n%s", diff)
	}
}
