package translate

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestOver(t *testing.T) {
	defaults := Options{
		Host: "d", Namespace: "d", Ports: []PortOptions{{Number: 1}}, FallbackPort: 1,
		Protocol: ProtocolOptions{Default: "http", Keys: []string{"d"}},
		Labels:   LabelOptions{Meta: []string{"d"}, Add: map[string]string{"a": "d", "b": "d"}},
		ExportTo: []string{"d"},
	}
	o := Options{
		Host:     "o",
		Protocol: ProtocolOptions{Keys: []string{"o"}},
		Labels:   LabelOptions{Add: map[string]string{"a": "o", "c": "o"}},
		ExportTo: []string{},
	}
	want := Options{
		Host: "o", Namespace: "d", Ports: []PortOptions{{Number: 1}}, FallbackPort: 1,
		Protocol: ProtocolOptions{Default: "http", Keys: []string{"o"}},
		Labels:   LabelOptions{Meta: []string{"d"}, Add: map[string]string{"a": "o", "b": "d", "c": "o"}},
		ExportTo: []string{},
	}
	got := o.Over(defaults)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	got.Labels.Add["a"], got.Labels.Meta[0] = "changed", "changed"
	if o.Labels.Add["a"] != "o" || defaults.Labels.Add["a"] != "d" || defaults.Labels.Meta[0] != "d" {
		t.Errorf("the result shares memory with its operands")
	}
}

// Over must know every field: one that it forgets would be lost from the
// configuration.
func TestOverTakesEveryField(t *testing.T) {
	var full Options
	fill(reflect.ValueOf(&full).Elem())
	checkNoZero(t, "", full)
	if diff := cmp.Diff(full, full.Over(Options{})); diff != "" {
		t.Errorf("over nothing (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(full, Options{}.Over(full)); diff != "" {
		t.Errorf("nothing over (-want +got):\n%s", diff)
	}
}

// fill sets every field, with "x" and its like.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i))
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Map:
		v.Set(reflect.ValueOf(map[string]string{"x": "x"}))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.String:
		v.SetString("x")
	case reflect.Int:
		v.SetInt(1)
	case reflect.Bool:
		v.SetBool(true)
	}
}

func TestNewWithoutRegistry(t *testing.T) {
	_, err := New("", Options{})
	fe, ok := errors.AsType[*FieldError](err)
	if !ok || fe.Field != "name" {
		t.Errorf("New without a registry's name: %v", err)
	}
}

// The schema and the reference are made of the tags.
func TestEveryOptionIsDescribed(t *testing.T) {
	checkTags(t, reflect.TypeFor[Options]())
}

func checkTags(t *testing.T, typ reflect.Type) {
	for i := range typ.NumField() {
		f := typ.Field(i)
		if f.Tag.Get("json") == "-" {
			continue
		}
		name, omit, _ := strings.Cut(f.Tag.Get("json"), ",")
		required := strings.Contains(f.Tag.Get("jsonschema"), "required")
		if name == "" || name != strings.ToLower(name) || (omit != "omitempty") != required {
			t.Errorf("%s.%s: json tag %q is no optional name in snake case", typ.Name(), f.Name, f.Tag.Get("json"))
		}
		if d := f.Tag.Get("jsonschema_description"); !strings.HasSuffix(d, ".") {
			t.Errorf("%s.%s: description %q is no sentence", typ.Name(), f.Name, d)
		}
		sub := f.Type
		if sub.Kind() == reflect.Slice {
			sub = sub.Elem()
		}
		if sub.Kind() == reflect.Struct {
			checkTags(t, sub)
		}
	}
}

// FuzzOptions: options that are accepted give valid resources, and those that
// are not give errors with a place.
func FuzzOptions(f *testing.F) {
	f.Add([]byte(`{}`))
	f.Add([]byte(`{"host":"{{.Name}}","ports":[{"name":"http","number":80,"protocol":"h2c"}],"labels":{"meta":["v*"],"add":{"a":"b"},"cluster":"none"},"health":"any"}`))
	f.Add([]byte(`{"protocol":{"default":"http","keys":["none"],"tags":["x=","tcp"]},"locality":{"keys":["team"],"region":"eu"},"export_to":[".","~"],"network":"n"}`))
	f.Add([]byte(`{"service_labels":{"meta":["*"],"add":{"x/y":"z"}},"annotations":{"add":{"a":"\ufffd"}},"subject_alt_names":["spiffe://x"],"service_account":"a.b","fallback_port":65535}`))
	f.Add([]byte(`{"preset":"slime","relabel":{"services":[{"source":["host"],"regex":"(.*)\\\\.local","target":"host"},{"action":"labelmap","regex":"__meta_(.+)"}],"instances":[{"source":["version"],"action":"drop","regex":"v2"},{"replacement":"x y","target":"z"}]}}`))
	f.Add([]byte(`{"instances":{"selector":"version in (v1,v2),!canary","cidrs":["10.0.0.0/8"]},"port_policy":"instance","port_name":"{{.Protocol}}","extra_ports":[{"name":"x","number":80}],"aliases":["a_{{.Name}}"]}`))
	f.Add([]byte(`{"subsets":{"key":"version","destination_rule":true},"cluster_id":"c","revision":"r","weights":"whole","locality":{"cidrs":[{"cidr":"10.0.0.0/8","locality":"eu/a"}]},"protocol":{"guess":["check","name","number"]},"service_account_key":"team"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var o Options
		if json.Unmarshal(b, &o) != nil {
			return
		}
		for _, text := range append([]string{o.Host, o.Namespace, o.Name, o.PortName}, o.Aliases...) {
			// Loops and widths are the configuration's own doing, and slow.
			if strings.Contains(text, "range") || strings.Contains(text, "%") || strings.Contains(text, "template") || strings.Contains(text, "block") {
				t.Skip()
			}
		}
		tr, err := New("r", o)
		if err != nil {
			for _, e := range err.(interface{ Unwrap() []error }).Unwrap() {
				if fe, ok := errors.AsType[*FieldError](e); !ok || !strings.HasPrefix(fe.Field, "translate.") || fe.Reason == "" {
					t.Errorf("error without a place: %v", e)
				}
			}
			return
		}
		svc, instances := service(3)
		svc.Meta = map[string]string{"version": "v1", "a b": "c d"}
		decodeResult(t, tr.Service(svc, instances, nil))
	})
}

// checkNoZero fails for each field of v that is unset: the test that uses v
// would not notice it missing.
func checkNoZero(t *testing.T, path string, v any) {
	t.Helper()
	rv := reflect.ValueOf(v)
	for i := range rv.NumField() {
		name := path + "." + rv.Type().Field(i).Name
		if rv.Field(i).IsZero() {
			t.Errorf("%s is unset", name)
		} else if rv.Field(i).Kind() == reflect.Struct {
			checkNoZero(t, name, rv.Field(i).Interface())
		}
	}
}
