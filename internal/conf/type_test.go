package conf_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/internal/conf"
	"github.com/isthmus-mesh/isthmus/plugin"
)

type sampleTLS struct {
	CAFile string        `json:"ca_file,omitempty" jsonschema_description:"Path of the CA."`
	Key    plugin.Secret `json:"key,omitempty"`
}

type samplePort struct {
	Name   string `json:"name,omitempty"`
	Number int    `json:"number" jsonschema:"required,minimum=1,maximum=65535"`
}

type sample struct {
	Address  string              `json:"address" jsonschema:"required" jsonschema_description:"Where the registry is."`
	Token    plugin.Secret       `json:"token,omitempty"`
	Wait     plugin.Duration     `json:"wait,omitempty"`
	Mode     string              `json:"mode,omitempty" jsonschema:"enum=fast,enum=slow"`
	Ratio    float64             `json:"ratio,omitempty"`
	Small    int8                `json:"small,omitempty"`
	On       bool                `json:"on,omitempty"`
	Tags     []string            `json:"tags,omitempty"`
	Labels   map[string]string   `json:"labels,omitempty"`
	TLS      *sampleTLS          `json:"tls,omitempty"`
	Ports    []samplePort        `json:"ports,omitempty"`
	Groups   map[string]*sample2 `json:"groups,omitempty"`
	untagged int
}

type sample2 struct {
	Weight int `json:"weight,omitempty"`
}

func (s sample) Validate() error {
	if s.Address == "wrong" {
		return errors.Join(
			&conf.FieldError{Field: "address", Reason: "is wrong"},
			fmt.Errorf("ports: %w", &conf.FieldError{Field: "ports[0].number", Reason: "does not fit"}),
			errors.New("nothing fits"),
		)
	}
	if s.Address == "names tls" {
		return errors.Join(&conf.FieldError{Field: "mode", Reason: "needs tls"}, &conf.FieldError{Field: "small", Reason: "x is too small"})
	}
	if s.Address == "panic" {
		panic("relies on the schema")
	}
	return nil
}

var sampleDefaults = sample{
	Address: "localhost", Token: "hush", Wait: plugin.Duration(5 * time.Second), Tags: []string{"a", "b"}, Labels: map[string]string{"x": "y"},
	TLS: &sampleTLS{CAFile: "/ca"}, untagged: 1,
}

func sampleType(t testing.TB) *conf.Type[sample] {
	t.Helper()
	typ, err := conf.New("config", sampleDefaults, conf.JSON)
	if err != nil {
		t.Fatal(err)
	}
	return typ
}

// Everything that is wrong is said at once, each with its path and a cure.
func TestConfigViolations(t *testing.T) {
	t.Parallel()
	typ := sampleType(t)
	for _, tt := range []struct {
		name, raw string
		want      []string
	}{
		{"unknown field", `{"address":"x","adress":"y"}`, []string{"config.adress: unknown field; did you mean address?"}},
		{"unknown field in another spelling", `{"address":"x","tls":{"caFile":"y"}}`, []string{"config.tls.caFile: unknown field; did you mean ca_file?"}},
		{"unknown field like no other", `{"address":"x","tls":{"zzzzzzz":"y"}}`, []string{"config.tls.zzzzzzz: unknown field; there are ca_file, key"}},
		{"unknown field with dots", `{"address":"x","a.b":1}`, []string{`config["a.b"]: unknown field; there are address, groups, labels, mode, on, ports, ratio, small, tags, tls, token, wait`}},
		{"letter case", `{"address":"x","Mode":"fast"}`, []string{"config.Mode: unknown field; did you mean mode?"}},
		{"missing", `{}`, []string{"config.address: is required"}},
		{"missing in a list", `{"address":"x","ports":[{"number":1},{}]}`, []string{"config.ports[1].number: is required"}},
		{"types", `{"address":5,"on":"yes","tags":"a","labels":["a"],"wait":7,"ratio":"1"}`, []string{
			"config.address: must be a string, not a number",
			"config.labels: must be an object, not a list",
			"config.on: must be true or false, not a string",
			"config.ratio: must be a number, not a string",
			"config.tags: must be a list, not a string",
			"config.wait: must be a string, not a number",
		}},
		{"type of a map's value", `{"address":"x","labels":{"a":1},"groups":{"b":{"weight":"c"}}}`, []string{
			"config.groups.b.weight: must be an integer, not a string",
			"config.labels.a: must be a string, not a number",
		}},
		{"enum", `{"address":"x","mode":"fats"}`, []string{`config.mode: must be one of fast, slow, not "fats"; did you mean fast?`}},
		{"duration", `{"address":"x","wait":"5 minutes"}`, []string{`config.wait: must be a duration such as "5s" or "1m30s"`}},
		{"negative duration", `{"address":"x","wait":"-5s"}`, []string{`config.wait: must be a duration such as "5s" or "1m30s"`}},
		{"endless duration", `{"address":"x","wait":"99999999999999999999h"}`, []string{`config: must be a duration such as "5s" or "1m30s"`}},
		{"range", `{"address":"x","ports":[{"number":0}]}`, []string{"config.ports[0].number: minimum: got 0, want 1"}},
		{"range of the type", `{"address":"x","small":300}`, []string{"config.small: must be an integer in the range of int8, not number 300"}},
		{"secret of a wrong type", `{"address":"x","token":["abc"]}`, []string{"config.token: must be a string, not a list"}},
		{"list", `[]`, []string{"config: must be an object, not a list"}},
		{"not JSON", `{`, []string{"config: not JSON: unexpected EOF"}},
		{"schema and validate", `{"address":"wrong","adress":"y","mode":"fats","on":1}`, []string{
			"config.adress: unknown field; did you mean address?",
			`config.mode: must be one of fast, slow, not "fats"; did you mean fast?`,
			"config.on: must be true or false, not a number",
			"config.address: is wrong", "config.ports[0].number: does not fit", "config: nothing fits",
		}},
		// What validate says of a value that cannot be used, of the block
		// around it, and what names it, is left out.
		{"schema before validate", `{"address":"wrong","ports":[{"number":"a"}]}`, []string{
			"config.ports[0].number: must be an integer, not a string", "config.address: is wrong", "config: nothing fits",
		}},
		{"schema before validate, a block", `{"address":"wrong","ports":[5]}`, []string{
			"config.ports[0]: must be an object, not a number", "config.address: is wrong", "config: nothing fits",
		}},
		{"schema before validate, by name", `{"address":"names tls","tls":5,"ratio":"x"}`, []string{
			"config.ratio: must be a number, not a string", "config.tls: must be an object, not a number", "config.small: x is too small",
		}},
		{"validate that panics", `{"address":"panic","on":1}`, []string{"config.on: must be true or false, not a number"}},
		{"validate", `{"address":"wrong"}`, []string{"config.address: is wrong", "config.ports[0].number: does not fit", "config: nothing fits"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, err := typ.Decode([]byte(tt.raw))
			if err == nil {
				t.Fatal("accepted")
			}
			if d := cmp.Diff(tt.want, strings.Split(err.Error(), "\n")); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
		})
	}
}

// The configuration is laid over the defaults, which stay what they are.
func TestConfigDefaults(t *testing.T) {
	t.Parallel()
	typ := sampleType(t)
	for range 2 {
		got, err := typ.Decode([]byte(`{"address":"x","tags":["c"],"labels":{"z":"w"},"tls":{"key":"k"},"wait":"1m","mode":null,"token":null}`))
		if err != nil {
			t.Fatal(err)
		}
		want := sample{
			Address: "x", Token: "hush", Wait: plugin.Duration(time.Minute), Tags: []string{"c"}, Labels: map[string]string{"x": "y", "z": "w"},
			TLS: &sampleTLS{CAFile: "/ca", Key: "k"}, untagged: 1,
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got %+v, want %+v", got, want)
		}
	}
	if want := (sample{
		Address: "localhost", Token: "hush", Wait: plugin.Duration(5 * time.Second), Tags: []string{"a", "b"}, Labels: map[string]string{"x": "y"},
		TLS: &sampleTLS{CAFile: "/ca"}, untagged: 1,
	}); !reflect.DeepEqual(sampleDefaults, want) {
		t.Errorf("the defaults changed: %+v", sampleDefaults)
	}
	for _, empty := range []string{"", "null", " {} "} {
		typ, err := conf.New("config", struct {
			A string `json:"a,omitempty"`
		}{"b"}, conf.JSON)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := typ.Decode([]byte(empty)); err != nil || got.A != "b" {
			t.Errorf("%q: %+v, %v", empty, got, err)
		}
	}
}

// The schema says what documentation needs: descriptions and defaults, but no
// secret.
func TestConfigSchema(t *testing.T) {
	t.Parallel()
	var s struct {
		Properties map[string]struct {
			Description string
			Default     any
			WriteOnly   bool
			Properties  map[string]struct{ Default any }
		}
		Required             []string
		AdditionalProperties *bool
	}
	typ := sampleType(t)
	if err := json.Unmarshal(typ.Schema, &s); err != nil {
		t.Fatal(err)
	}
	if p := s.Properties["address"]; p.Description != "Where the registry is." || p.Default != "localhost" {
		t.Errorf("address: %+v", p)
	}
	if p := s.Properties["wait"]; p.Default != "5s" {
		t.Errorf("wait: %+v", p)
	}
	if p := s.Properties["token"]; p.Default != nil || !p.WriteOnly {
		t.Errorf("token: %+v", p)
	}
	if p := s.Properties["tls"].Properties["ca_file"]; p.Default != "/ca" {
		t.Errorf("tls.ca_file: %+v", p)
	}
	if s.AdditionalProperties == nil || *s.AdditionalProperties || !cmp.Equal(s.Required, []string{"address"}) {
		t.Errorf("additionalProperties %v, required %v", s.AdditionalProperties, s.Required)
	}
	if strings.Contains(string(typ.Schema), "hush") {
		t.Error("the schema holds a secret")
	}
	if _, err := conf.New("config", func() {}, conf.JSON); err == nil {
		t.Error("a function has a schema")
	}
}

// A decoded configuration is one that the schema accepts; anything else is
// errors with a path into the block.
func FuzzConfig(f *testing.F) {
	for _, s := range []string{
		``, `{}`, `null`, `[]`, `{"address":"x"}`, `{"address":"x","ports":[{"number":1e3}],"labels":{"":""},"wait":"1h"}`, `{"address":1}`,
		`{"address":"x","groups":{"a.b":{"weight":1.0}}}`, `{"address":"x","small":127.0}`, `{"a":`, `{"address":"x","tls":null}`, "{\"\xff\":1}",
		`{"address":"x","address":"y","ratio":1e999}`,
	} {
		f.Add([]byte(s))
	}
	for _, open := range []string{`[`, `{"labels":`, `{"tls":`} {
		f.Add([]byte(strings.Repeat(open, 70)))
		f.Add([]byte(strings.Repeat(open, 20_000)))
		f.Add([]byte(strings.Repeat(open, 5000) + "1" + strings.Repeat(map[byte]string{'[': "]", '{': "}"}[open[0]], 5000)))
	}
	typ := sampleType(f)
	f.Fuzz(func(t *testing.T, raw []byte) {
		c, err := typ.Decode(raw)
		if err == nil {
			if c.Address == "" && !strings.Contains(string(raw), "address") {
				t.Errorf("accepted without an address")
			}
			return
		}
		for _, e := range conf.FieldErrors(err) {
			if e.Field != "config" && !strings.HasPrefix(e.Field, "config.") && !strings.HasPrefix(e.Field, "config[") || e.Reason == "" {
				t.Errorf("error %q: %q", e.Field, e.Reason)
			}
		}
		if len(conf.FieldErrors(err)) == 0 {
			t.Error("an error without a field")
		}
	})
}
