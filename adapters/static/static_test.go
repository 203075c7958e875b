package static

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/plugintest"
)

const example = `{"services": [
	{"name": "db.example.org", "ports": [{"name": "postgres", "number": 5432, "protocol": "tcp"}], "metadata": {"team": "data"},
	 "endpoints": ["10.0.0.2", "10.0.0.1:5433", "2001:db8::1", "[2001:db8::1]:5434", "host.example.org:5432"]},
	{"name": "web", "instances": [
	 {"address": "10.0.1.1", "ports": [{"name": "http", "number": 80}, {"name": "grpc", "number": 81}], "weight": 2, "locality": "eu/eu-1", "metadata": {"version": "v2"}},
	 {"address": "10.0.1.1", "id": "second", "ports": [{"number": 80}], "disabled": true}]},
	{"name": "none", "endpoints": []}]}`

// TestServices shows what the services of a configuration become.
func TestServices(t *testing.T) {
	var c Config
	if err := json.Unmarshal([]byte(example), &c); err != nil {
		t.Fatal(err)
	}
	a, err := New(c, plugin.Env{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	catalog := plugintest.NewCatalog()
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx, catalog) }()
	catalog.AwaitSynced(t, time.Minute)
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	catalog.Look(func(h *plugintest.Held) {
		var got []string
		for _, key := range []string{"db.example.org", "web", "none"} {
			got = append(got, fmt.Sprint(key, h.Services[key].Meta))
			for _, i := range h.Instances[key] {
				weight := "-"
				if i.Weight != nil {
					weight = fmt.Sprint(*i.Weight)
				}
				got = append(got, fmt.Sprintf("%s: %s %v %v %s %v %t", i.ID, i.Address, i.Ports, i.Meta, weight, i.Locality, i.Disabled))
			}
		}
		want := []string{
			"db.example.orgmap[team:data]",
			"10.0.0.1:5433: 10.0.0.1 [{postgres 5433 tcp}] map[] - {  } false",
			"10.0.0.2: 10.0.0.2 [{postgres 5432 tcp}] map[] - {  } false",
			"2001:db8::1: 2001:db8::1 [{postgres 5432 tcp}] map[] - {  } false",
			"[2001:db8::1]:5434: 2001:db8::1 [{postgres 5434 tcp}] map[] - {  } false",
			"host.example.org:5432: host.example.org [{postgres 5432 tcp}] map[] - {  } false",
			"webmap[]",
			"10.0.1.1:80: 10.0.1.1 [{http 80 } {grpc 81 }] map[version:v2] 2 {eu eu-1 } false",
			"second: 10.0.1.1 [{ 80 }] map[] - {  } true",
			"nonemap[]",
		}
		if !slices.Equal(got, want) {
			t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		if h.Degraded != "" || h.Detail != "configured" || h.Heard == 0 {
			t.Errorf("degraded %q, detail %q, heard %d", h.Degraded, h.Detail, h.Heard)
		}
	})
}

// TestValidate shows that everything that is wrong is found, at its place.
func TestValidate(t *testing.T) {
	var c Config
	if err := json.Unmarshal([]byte(`{"services": [{"endpoints": ["10.0.0.1"]}, {"name": "a", "ports": [{"number": 1}, {"number": 1}, {"name": "x", "number": 70000}]},
		{"name": "a", "ports": [{"number": 1}], "endpoints": ["not an address", "10.0.0.1:x", "10.0.0.2", "10.0.0.2", {"address": "b", "weight": -1, "locality": "/x"}]},
		{"name": "both", "endpoints": [], "instances": []}, {"name": "c", "instances": ["10.0.0.1"]}]}`), &c); err != nil {
		t.Fatal(err)
	}
	want := strings.Fields(`services[0].endpoints[0].ports services[0].name services[1].ports[1].name services[1].ports[1].number services[1].ports[2].number
		services[2].endpoints[0].address services[2].endpoints[1].ports[0].number services[2].endpoints[3].id services[2].endpoints[4].locality
		services[2].endpoints[4].weight services[2].name services[3].instances services[4].instances[0].ports`)
	var fields []string
	for _, e := range c.Validate().(interface{ Unwrap() []error }).Unwrap() { //nolint:errorlint // what errors.Join returns
		f, ok := errors.AsType[*plugin.FieldError](e)
		if !ok {
			t.Fatalf("%v is not a FieldError", e)
		}
		fields = append(fields, f.Field)
	}
	slices.Sort(fields)
	if !slices.Equal(fields, want) {
		t.Errorf("fields\n%v\nwant\n%v", fields, want)
	}
	if err := (Config{}).Validate(); err == nil || !strings.Contains(err.Error(), "services") {
		t.Errorf("without services: %v", err)
	}
	if err := (Config{Services: []Service{}}).Validate(); err != nil {
		t.Errorf("without any service: %v", err)
	}
}

// TestConformance shows that the adapter as a plugin keeps the contract.
func TestConformance(t *testing.T) {
	plugintest.Conformance(t, plugintest.Config{Config: json.RawMessage(example), Adapter: "static", Within: 90 * time.Second})
}

// FuzzConfig shows that no configuration makes the adapter panic, and that IDs
// are unique in each service of a valid one.
func FuzzConfig(f *testing.F) {
	f.Add([]byte(example))
	f.Add([]byte(`{"services": [{"name": "a", "endpoints": ["[::1]:1", "::1", "a:b:c", {}]}]}`))
	f.Add([]byte(`{"services":` + strings.Repeat(`[`, 9000) + "1" + strings.Repeat("]", 9000) + "}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		var c Config
		if json.Unmarshal(b, &c) != nil || c.Validate() != nil {
			return
		}
		for _, s := range c.Services {
			_, instances := s.convert()
			for i := 1; i < len(instances); i++ {
				if instances[i-1].ID == instances[i].ID {
					t.Errorf("%s has %s twice", s.Name, instances[i].ID)
				}
			}
		}
	})
}
