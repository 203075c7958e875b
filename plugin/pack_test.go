package plugin

import (
	"math"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// fill sets each part of a value to something that is not empty, a different
// one each time.
func fill(random *rand.Rand, v reflect.Value) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fill(random, v.Field(i))
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(random, v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1+random.IntN(3), 5))
		for i := range v.Len() {
			fill(random, v.Index(i))
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for range 1 + random.IntN(9) {
			key, of := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
			fill(random, key)
			fill(random, of)
			v.SetMapIndex(key, of)
		}
	case reflect.String:
		text := make([]byte, 1+random.IntN(200))
		for i := range text {
			text[i] = byte(random.Uint32())
		}
		v.SetString(string(text))
	case reflect.Float64:
		v.SetFloat(random.NormFloat64())
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int:
		v.SetInt([]int64{1, -1, 1 << 40, math.MinInt64, math.MaxInt64, int64(random.IntN(65536))}[random.IntN(6)])
	case reflect.Uint8:
		v.SetUint(1 + random.Uint64N(255))
	default:
		panic(v.Kind())
	}
}

// A list that is packed is the same afterwards, and each field is part of it:
// a new field of an instance fails here until pack has it.
func TestPack(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // a test
	var buffer []byte
	for range 300 {
		in := make([]registry.Instance, random.IntN(5))
		for i := range in {
			fill(random, reflect.ValueOf(&in[i]).Elem())
			// Some fields are empty, in any combination.
			for f := range reflect.TypeFor[registry.Instance]().NumField() {
				if v := reflect.ValueOf(&in[i]).Elem().Field(f); random.IntN(3) == 0 {
					v.SetZero()
				}
			}
		}
		var p packed
		p, buffer = pack(in, buffer)
		if got := p.unpack(); !EqualInstances(got, in) || p.len() != len(in) {
			t.Fatal(cmp.Diff(in, got))
		}
		if len(in) == 0 {
			continue
		}
		i := random.IntN(len(in))
		field := reflect.ValueOf(&in[i]).Elem().Field(random.IntN(reflect.TypeFor[registry.Instance]().NumField()))
		empty := field.IsZero()
		if field.SetZero(); empty {
			fill(random, field)
		}
		if other, _ := pack(in, nil); other == p {
			t.Fatalf("the same packed with another field: %+v", in[i])
		}
	}
}

// Empty and missing lists of an instance are the same, as for EqualInstances.
func TestPackEmpty(t *testing.T) {
	a, _ := pack([]registry.Instance{{ID: "a"}}, nil)
	b, _ := pack([]registry.Instance{{ID: "a", Ports: []registry.Port{}, Tags: []string{}, Meta: map[string]string{}}}, nil)
	if a != b {
		t.Errorf("%q, %q", a, b)
	}
	if got, _ := pack([]registry.Instance{}, nil); got != "" || got.unpack() != nil || got.len() != 0 {
		t.Errorf("%q", got)
	}
}
