package main

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	yamlv3 "go.yaml.in/yaml/v3"
	"sigs.k8s.io/yaml"
)

// editorSchema returns what checks a configuration by the schema for editors.
func editorSchema(t *testing.T, flags ...string) func(text []byte) error {
	t.Helper()
	raw, err := exec.CommandContext(t.Context(), "isthmus", append([]string{"docs", "--schema"}, flags...)...).Output()
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
	return func(text []byte) error {
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
}

// configurations returns those that a YAML file holds: a document itself, or a
// file in a ConfigMap.
func configurations(t *testing.T, file string) (texts [][]byte) {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for d := yamlv3.NewDecoder(f); ; {
		var doc map[string]any
		if err := d.Decode(&doc); errors.Is(err, io.EOF) {
			return texts
		} else if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if doc["kind"] == "ConfigMap" {
			data, _ := doc["data"].(map[string]any)
			if text, ok := data["isthmus.yaml"].(string); ok {
				texts = append(texts, []byte(text))
			}
		}
		if doc["registries"] != nil {
			text, err := yamlv3.Marshal(doc)
			if err != nil {
				t.Fatal(err)
			}
			texts = append(texts, text)
		}
	}
}

// Every configuration of the examples is one that the schema for editors takes,
// and the program, with the environment that its page names.
func TestExamples(t *testing.T) {
	validate := editorSchema(t)
	found := 0
	err := filepath.WalkDir("../../examples", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != ".yaml" {
			return err
		}
		for _, text := range configurations(t, path) {
			found++
			if err := validate(text); err != nil {
				t.Errorf("%s: %v", path, err)
			}
			file := filepath.Join(t.TempDir(), "isthmus.yaml")
			if err := os.WriteFile(file, text, 0o600); err != nil {
				return err
			}
			cmd := exec.CommandContext(t.Context(), "isthmus", "validate", "--config", file)
			cmd.Dir = "../.." // which relative paths start at
			cmd.Env = append(os.Environ(), "SHOP_NACOS_PASSWORD=secret", "BANK_NACOS_PASSWORD=secret")
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("%s: %v\n%s", path, err, out)
			}
			source, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			if !bytes.Contains(source, []byte("# yaml-language-server: $schema="+schemaID+"\n")) {
				t.Errorf("%s does not tell editors its schema, %s", path, schemaID)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if found < 6 {
		t.Errorf("%d configurations were found in the examples: the pattern is wrong", found)
	}
}

// The schema for editors takes what the program takes, and refuses what it
// refuses, down to the adapters' blocks.
func TestSchema(t *testing.T) {
	validate := editorSchema(t)
	for name, good := range map[string]string{
		"a plugin's own block": "registries: [{name: a, type: zoo, config: {anything: 1}}]",
		"no bound of memory":   "registries: [{name: a, type: sim}]\nlimits: {plugin_memory: 0}",
	} {
		if err := validate([]byte(good)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, bad := range map[string]string{
		"no registries":        "listen: {xds: ':1'}",
		"unknown field":        "registries: [{name: a, type: sim}]\nlisen: {}",
		"no type":              "registries: [{name: a}]",
		"no resource":          "registries: [{name: a, type: sim}]\nlimits: {resources_per_registry: 0}",
		"adapter's field":      "registries: [{name: a, type: sim, config: {servces: 1}}]",
		"adapter's field type": "registries: [{name: a, type: sim, config: {services: many}}]",
		"translate's field":    "registries: [{name: a, type: consul, translate: {hosts: x}}]",
	} {
		if validate([]byte(bad)) == nil {
			t.Errorf("%s: the schema takes %s", name, bad)
		}
	}
}

// With a plugin directory the schema checks the blocks of its adapters too,
// whatever their schemas look like.
func TestSchemaOfPlugins(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{brokenAdapter, hostileAdapter} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\nexec "+name+"\n"), 0o755); err != nil { //nolint:gosec // it is a program
			t.Fatal(err)
		}
	}
	validate := editorSchema(t, "--plugin-dir", dir)
	for text, ok := range map[string]bool{
		"registries: [{name: a, type: broken, config: {do: hang, count: 1}}]":     true,
		"registries: [{name: a, type: broken, config: {do: hang, many: 1}}]":      false,
		"registries: [{name: a, type: broken, config: {do: 1}}]":                  false,
		"registries: [{name: a, type: broken, translate: {hosts: x}}]":            false,
		"registries: [{name: a, type: broken, translate: {namespace: shop}}]":     true,
		"registries: [{name: a, type: hostile, config: {anything: 1}}]":           true,
		"registries: [{name: a, type: zoo, config: {anything: 1}}]":               true,
		"registries: [{name: a, type: sim, config: {servces: 1}}]":                false,
		"registries: [{name: a, type: sim, config: {services: 1}}]\nplugin_di: x": false,
	} {
		if err := validate([]byte(text)); (err == nil) != ok {
			t.Errorf("%s: %v", text, err)
		}
	}
}
