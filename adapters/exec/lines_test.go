package exec

import (
	"bytes"
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// lines are what a program may print, and what is wrong with others.
var lines = []struct {
	line string
	bad  string // in the reason, "" if the line is good
	// lax marks what only the program checks, as a JSON Schema cannot.
	lax bool
}{
	{line: `{}`},
	{line: `{"service": {"name": "web", "instances": []}}`},
	{line: `{"service": {"name": "web", "group": "g", "namespace": "n", "partition": "p", "datacenter": "d", "ports": [{"name": "http", "number": 80, "protocol": "http"}, 81],
		"meta": {"a": "b", "n": 1.5, "t": true}, "tags": ["x"], "instances": [{"id": "1", "address": "192.0.2.1", "ports": [8080], "meta": {"v": 2}, "tags": ["y"],
		"weight": 0, "health": "warning", "check": "http", "disabled": true, "locality": "eu/eu-1/rack", "cluster": "c", "node": "h"}]}}`},
	{line: `{"service": {"name": "web", "instances": [{"address": "192.0.2.1", "port": 80}]}}`},
	{line: `{"service": {"name": "web", "endpoints": [{"address": "192.0.2.1", "port": 80}]}}`},
	{line: `{"services": []}`},
	{line: `{"services": [{"name": "web", "instances": []}, {"name": "web", "group": "g", "instances": []}]}`},
	{line: `{"remove": {"name": "web", "group": "g"}}`},
	{line: `{"synced": true}`},
	{line: `{"degraded": "cut off"}`},
	{line: `{"degraded": ""}`},
	{line: `{"detail": "from a file"}`},
	{line: `{"problem": {"id": "x", "reason": "y"}}`},
	{line: `{"problem": {"id": "x", "reason": ""}}`},

	{line: `7`, bad: "not a JSON object"},
	{line: `[]`, bad: "not a JSON object"},
	{line: `null`, bad: "not a JSON object"},
	{line: `{"service":`, bad: "ends too early", lax: true},
	{line: `{"synced": true} {"synced": true}`, bad: "more behind the object", lax: true},
	{line: `{"synced": true, "degraded": ""}`, bad: "says one thing"},
	{line: `{"sync": true}`, bad: `"sync" is unknown`},
	{line: `{"synced": false}`, bad: "must be true"},
	{line: `{"synced": null}`, bad: "synced is null"},
	{line: `{"services": null}`, bad: "services is null"},
	{line: `{"services": {}}`, bad: "services: it cannot be a JSON object"},
	{line: `{"service": {"instances": []}}`, bad: "has no name"},
	{line: `{"service": {"name": 7, "instances": []}}`, bad: "name cannot be a JSON number"},
	{line: `{"remove": "web"}`, bad: "remove: it cannot be a JSON string"},
	{line: `{"remove": {}}`, bad: "has no name"},
	{line: `{"remove": {"name": "web", "instances": []}}`, bad: `unknown field "instances"`},
	{line: `{"problem": {"reason": "y"}}`, bad: "no id"},
	{line: `{"degraded": true}`, bad: "degraded: it cannot be a JSON bool"},
}

// services are those that cannot be used, by what is wrong with them.
var badServices = []struct {
	line, bad string
	lax       bool
}{
	{`{"service": {"name": "web"}}`, "no instances; write []", false},
	{`{"service": {"name": "web", "instances": null}}`, "no instances; write []", false},
	{`{"service": {"name": "web", "instances": [], "endpoints": []}}`, "instances or endpoints, not both", false},
	{`{"service": {"name": "web", "endpoints": [{"id": "1", "health": "ok"}]}}`, "endpoints[0]: health must be", false},
	{`{"service": {"name": "web", "instances": [], "port": 80}}`, `unknown field "port"`, false},
	{`{"service": {"name": "web", "instances": [{"adress": "192.0.2.1"}]}}`, `unknown field "adress"`, false},
	{`{"service": {"name": "web", "instances": [{"address": "192.0.2.1"}]}}`, "instances[0]: an instance without an id needs", true},
	{`{"service": {"name": "web", "instances": [{"id": "1", "health": "ok"}]}}`, `health must be passing, warning, critical or unknown, not "ok"`, false},
	{`{"service": {"name": "web", "instances": [{"id": "1", "locality": "a/b/c/d"}]}}`, "locality must be", false},
	{`{"service": {"name": "web", "instances": [{"id": "1", "weight": -1}]}}`, "weight must be 0 or more", false},
	{`{"service": {"name": "web", "instances": [{"id": "1", "port": 80, "ports": [80]}]}}`, "port or ports, not both", false},
	{`{"service": {"name": "web", "instances": [{"id": "1"}, {"id": "1"}]}}`, `the id "1" is there twice`, true},
	{`{"service": {"name": "web", "instances": [], "ports": [80, 81]}}`, "is there twice", true},
	{`{"service": {"name": "web", "instances": [], "ports": [{"name": "http"}]}}`, "ports[0] has no number", false},
	{`{"service": {"name": "web", "instances": [], "ports": ["http"]}}`, "a port must be a number", false},
	{`{"service": {"name": "web", "instances": [], "meta": {"a": {}}}}`, "a value of meta must be a text", false},
}

// schema is that of docs/registries, which must agree with the parser.
func schema(t testing.TB) *jsonschema.Schema {
	t.Helper()
	raw, err := os.ReadFile("../../docs/registries/exec.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("lines", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("lines")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func valid(t testing.TB, s *jsonschema.Schema, line string) bool {
	t.Helper()
	v, err := jsonschema.UnmarshalJSON(strings.NewReader(line))
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return s.Validate(v) == nil
}

// A line is taken or refused with the reason, by the parser and by the schema
// alike.
func TestLines(t *testing.T) {
	s := schema(t)
	for _, tt := range lines {
		_, err := parse([]byte(tt.line))
		if tt.bad == "" && err != nil || tt.bad != "" && (err == nil || !strings.Contains(err.Error(), tt.bad)) {
			t.Errorf("%s: error %v, want %q", tt.line, err, tt.bad)
		}
		if !tt.lax && valid(t, s, tt.line) != (tt.bad == "") {
			t.Errorf("the schema takes %s: %t", tt.line, tt.bad != "")
		}
	}
	for _, tt := range badServices {
		m, err := parse([]byte(tt.line))
		if err != nil || len(m.services) != 0 || len(m.bad) != 1 || m.bad[0].id != "service web" || !strings.Contains(m.bad[0].reason, tt.bad) {
			t.Errorf("%s: %+v, %v, want %q", tt.line, m, err, tt.bad)
		}
		if !tt.lax && valid(t, s, tt.line) {
			t.Errorf("the schema takes %s", tt.line)
		}
	}
}

// Each word becomes that of the registry.
func TestWords(t *testing.T) {
	m, err := parse([]byte(lines[2].line))
	if err != nil {
		t.Fatal(err)
	}
	want := []plugin.Snapshot{{
		Service: registry.Service{
			Key:   registry.Key{Name: "web", Group: "g", Namespace: "n", Partition: "p", Datacenter: "d"},
			Ports: []registry.Port{{Name: "http", Number: 80, Protocol: "http"}, {Number: 81}},
			Meta:  map[string]string{"a": "b", "n": "1.5", "t": "true"}, Tags: []string{"x"},
		},
		Instances: []registry.Instance{{
			ID: "1", Address: "192.0.2.1", Ports: []registry.Port{{Number: 8080}}, Meta: map[string]string{"v": "2"}, Tags: []string{"y"}, Weight: new(0.0),
			Health: registry.HealthWarning, Check: "http", Disabled: true, Locality: registry.Locality{Region: "eu", Zone: "eu-1", SubZone: "rack"}, Cluster: "c", Node: "h",
		}},
	}}
	if diff := cmp.Diff(want, m.services); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	m, err = parse([]byte(`{"service": {"name": "web", "ports": [{"name": "grpc", "number": 9000, "protocol": "grpc"}], "instances": [{"address": "192.0.2.1", "port": 80}, {"id": "b", "address": "192.0.2.2"}]}}`))
	if err != nil || len(m.services) != 1 {
		t.Fatal(m, err)
	}
	got := m.services[0].Instances
	if got[0].ID != "192.0.2.1:80" || got[0].Ports[0] != (registry.Port{Name: "grpc", Number: 80, Protocol: "grpc"}) || got[1].Ports[0].Number != 9000 {
		t.Errorf("%+v", got)
	}
}

// The examples of the README are lines.
func TestREADME(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	found, s := 0, schema(t)
	for _, block := range regexp.MustCompile("(?ms)^```(?:json)?\\n(\\{.*?)^```").FindAllStringSubmatch(string(text), -1) {
		text := block[1]
		if strings.HasPrefix(block[0], "```json") { // shown on several lines
			text = strings.ReplaceAll(text, "\n", " ")
		}
		for line := range strings.Lines(text) {
			found++
			if m, err := parse([]byte(line)); err != nil || len(m.bad) > 0 || !valid(t, s, line) {
				t.Errorf("%s: %v, %v", line, err, m.bad)
			}
		}
	}
	if found != 4 {
		t.Errorf("%d lines were found: the pattern is wrong", found)
	}
}

// Lines are cut off at a bound, wherever the pieces end, and those behind are
// read.
func TestEachLine(t *testing.T) {
	const most = 100_000
	for in, want := range map[string]string{
		"":                                       "",
		"a\nb":                                   "a|b|",
		"a\r\n\nb\n":                             "a||b|",
		strings.Repeat("x", most) + "\nb\n":      strings.Repeat("x", most) + "|b|",
		strings.Repeat("x", most+1) + "\nb\n":    strings.Repeat("x", most) + "!|b|",
		strings.Repeat("x", 3*most) + "\nb":      strings.Repeat("x", most) + "!|b|",
		strings.Repeat("\r", 3*most) + "\nb\r\n": strings.Repeat("\r", most-1) + "!|b|",
		strings.Repeat("x", 3*most):              strings.Repeat("x", most) + "!|",
	} {
		var got strings.Builder
		eachLine(strings.NewReader(in), most, func(line []byte, err error) {
			got.Write(line)
			if errors.Is(err, errLineTooLong) {
				got.WriteString("!")
			}
			got.WriteString("|")
		})
		if got.String() != want {
			t.Errorf("%.20q of %d bytes: %.20q of %d bytes", in, len(in), got.String(), got.Len())
		}
	}
}

// No line makes the parser panic, and what it takes has all that the catalog
// needs.
func FuzzParse(f *testing.F) {
	for _, l := range lines {
		f.Add([]byte(l.line))
	}
	for _, l := range badServices {
		f.Add([]byte(l.line))
	}
	f.Add([]byte(`{"service":` + strings.Repeat(`{"meta":`, 9000) + "1" + strings.Repeat("}", 9000)))
	f.Add([]byte(strings.Repeat(`{"service":`, 20_000)))
	f.Fuzz(func(t *testing.T, line []byte) {
		m, err := parse(line)
		if err != nil {
			if m.services != nil || m.bad != nil || m.whole || m.remove != nil || m.synced {
				t.Errorf("%v, and %+v", err, m)
			}
			return
		}
		for _, s := range m.services {
			if s.Service.Key.Name == "" {
				t.Errorf("%+v has no name", s)
			}
			ids := map[string]bool{}
			for _, in := range s.Instances {
				if in.ID == "" || ids[in.ID] {
					t.Errorf("%+v has an id that is empty or there twice", s)
				}
				ids[in.ID] = true
			}
		}
		for _, b := range m.bad {
			if b.id == "" || b.reason == "" {
				t.Errorf("%+v", b)
			}
		}
	})
}
