package translate

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// Each step names the field that decided, and explaining changes nothing of the
// translation.
func TestExplain(t *testing.T) {
	tr := mustNew(t, Options{
		Host: "{{.Name}}.example.org", Ports: []PortOptions{{Name: "admin", Protocol: "http"}},
		Instances: InstanceOptions{CIDRs: []string{"10.0.0.0/8"}},
	})
	port := func(name string, number int) registry.Port { return registry.Port{Name: name, Number: number} }
	svc := registry.Service{Key: registry.Key{Name: "Web_App"}}
	instances := []registry.Instance{
		{ID: "a", Address: "10.0.0.1", Ports: []registry.Port{port("admin", 9000), port("grpc-api", 7000), port("x", 1)}},
		{ID: "b", Address: "10.0.0.2", Ports: []registry.Port{port("admin", 9000)}, Disabled: true},
		{ID: "c", Address: "10.0.0.3", Ports: []registry.Port{port("admin", 9000)}, Health: registry.HealthCritical},
		{ID: "d", Address: "192.0.2.1", Ports: []registry.Port{port("admin", 9000)}},
		{ID: "e", Ports: []registry.Port{port("admin", 9000)}},
	}
	e := tr.Explain(svc, instances)
	if e.Host != "web-app.example.org" || e.Name != "r/web-app" || !e.Served {
		t.Errorf("host %q, name %q, served %t", e.Host, e.Name, e.Served)
	}
	var steps []string
	for _, s := range e.Steps {
		text, _, _ := strings.Cut(s.Text, ";")
		steps = append(steps, s.Rule+"|"+s.Subject+"|"+text)
	}
	for _, want := range []string{
		`translate.host|host|web-app.example.org, made legal from "Web_App.example.org"`,
		"translate.ports|protocol of port admin|HTTP, as configured",
		"translate.port_policy|port admin|number 9000, that of most instances",
		"port|protocol of port grpc-api|GRPC, as the port's name begins with it",
		"translate.protocol.default|protocol of port x|TCP, as nothing says it: neither the port, nor its name, nor metadata (translate.protocol.keys), nor a tag (translate.protocol.tags)",
	} {
		if !strings.Contains(strings.Join(steps, "\n"), want) {
			t.Errorf("no step %s in\n%s", want, strings.Join(steps, "\n"))
		}
	}
	got := map[string]string{}
	for _, i := range e.Instances {
		for _, s := range i.Steps {
			got[i.ID] += s.Rule + " "
		}
		if served := i.Resource != ""; served != (i.ID == "a") {
			t.Errorf("instance %s: served %t", i.ID, served)
		}
	}
	want := map[string]string{
		"a": "translate.labels ", "b": "maintenance ", "c": "translate.health ", "d": "translate.instances.cidrs ", "e": "translate.instances.cidrs ",
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("rules by instance (-want +got):\n%s", d)
	}
	plain := tr.Service(svc, instances, nil)
	if names := endpointNames(plain); len(names) != 1 || names[0] != e.Instances[0].Resource {
		t.Errorf("it serves %v, and %s is explained", names, e.Instances[0].Resource)
	}
}

func endpointNames(r *Result) (names []string) {
	for e := range r.Each() {
		names = append(names, e.Name)
	}
	return names
}

// What the registry states about protocols is told from what is guessed.
func TestExplainProtocol(t *testing.T) {
	for rule, set := range map[string]func(*registry.Service, *registry.Instance){
		"registry":                   func(_ *registry.Service, i *registry.Instance) { i.Ports[0].Protocol = "http" },
		"translate.protocol.keys":    func(_ *registry.Service, i *registry.Instance) { i.Meta = map[string]string{"protocol": "http"} },
		"translate.protocol.tags":    func(s *registry.Service, _ *registry.Instance) { s.Tags = []string{"http"} },
		"translate.protocol.guess":   func(s *registry.Service, _ *registry.Instance) { s.Key.Name = "grpc-web-api" },
		"translate.protocol.default": func(*registry.Service, *registry.Instance) {},
	} {
		svc := registry.Service{Key: registry.Key{Name: "web"}}
		inst := registry.Instance{ID: "a", Address: "10.0.0.1", Ports: []registry.Port{{Number: 8080}}}
		set(&svc, &inst)
		tr := mustNew(t, Options{Protocol: ProtocolOptions{Keys: []string{"protocol"}, Tags: []string{"http"}, Guess: []string{"name"}}})
		var rules []string
		for _, s := range tr.Explain(svc, []registry.Instance{inst}).Steps {
			if strings.HasPrefix(s.Subject, "protocol of port") {
				rules = append(rules, s.Rule)
			}
		}
		if d := cmp.Diff([]string{rule}, rules); d != "" {
			t.Errorf("%s (-want +got):\n%s", rule, d)
		}
	}
}
