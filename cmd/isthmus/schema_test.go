package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"sigs.k8s.io/yaml"
)

// The schema for editors takes what the program takes, and refuses what it refuses, down to the adapters' blocks.
func TestSchema(t *testing.T) {
	raw, err := exec.CommandContext(t.Context(), "isthmus", "docs", "--schema").Output()
	if err != nil {
		t.Fatal(err)
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("configuration", doc); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("configuration")
	if err != nil {
		t.Fatal(err)
	}
	validate := func(text []byte) error {
		t.Helper()
		b, err := yaml.YAMLToJSON(text)
		if err != nil {
			t.Fatal(err)
		}
		v, err := jsonschema.UnmarshalJSON(bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		return s.Validate(v)
	}
	for _, good := range []string{"../../examples/quickstart/isthmus.yaml", "../../examples/consul/isthmus.yaml", "../../examples/nacos/isthmus.yaml", "../../examples/istiod/compose/isthmus.yaml"} {
		text, err := os.ReadFile(filepath.FromSlash(good))
		if err != nil {
			t.Fatal(err)
		}
		if err := validate(text); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
	if err := validate([]byte("registries: [{name: a, type: zoo, config: {anything: 1}}]")); err != nil {
		t.Errorf("a plugin's own block: %v", err)
	}
	for name, bad := range map[string]string{
		"no registries":        "listen: {xds: ':1'}",
		"unknown field":        "registries: [{name: a, type: sim}]\nlisen: {}",
		"no type":              "registries: [{name: a}]",
		"adapter's field":      "registries: [{name: a, type: sim, config: {servces: 1}}]",
		"adapter's field type": "registries: [{name: a, type: sim, config: {services: many}}]",
		"translate's field":    "registries: [{name: a, type: consul, translate: {hosts: x}}]",
	} {
		if validate([]byte(bad)) == nil {
			t.Errorf("%s: the schema takes %s", name, bad)
		}
	}
}
