package translate

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

// Every field that a reason names exists, and most reasons name one: only of
// the others the registry alone can change something.
func TestReasonsNameFields(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txtar")
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile(`\btranslate((?:\.[a-z_]+(?:\[[0-9]+\])?)+)`)
	ofRegistry := regexp.MustCompile(`register it with (an IP address|a port|the port)|register an instance|enable it there|another weight in the registry|give each its own|the adapter must set one|name the ports|add it to the service|state one from`)
	seen := map[string]bool{}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		_, out, _ := strings.Cut(string(b), "-- out.yaml --")
		for line := range strings.Lines(out) {
			if !strings.HasPrefix(line, "# service ") && !strings.HasPrefix(line, "# instance ") && !strings.HasPrefix(line, "# left out: ") {
				continue
			}
			fields := named.FindAllStringSubmatch(line, -1)
			if len(fields) == 0 && !ofRegistry.MatchString(line) {
				t.Errorf("%s: names no field that would change it: %s", file, line)
			}
			for _, f := range fields {
				seen[f[1]] = true
				if !hasField(reflect.TypeFor[Options](), strings.Split(f[1][1:], ".")) {
					t.Errorf("%s: there is no field translate%s: %s", file, f[1], line)
				}
			}
		}
	}
	if len(seen) < 10 {
		t.Errorf("the goldens name the fields %v only", seen)
	}
}

// hasField reports whether there is a field of a path of names in JSON.
func hasField(typ reflect.Type, path []string) bool {
	if len(path) == 0 {
		return true
	}
	if typ.Kind() == reflect.Slice {
		typ = typ.Elem()
	}
	if typ.Kind() != reflect.Struct {
		return false
	}
	name, _, _ := strings.Cut(path[0], "[")
	for i := range typ.NumField() {
		if tag, _, _ := strings.Cut(typ.Field(i).Tag.Get("json"), ","); tag == name {
			return hasField(typ.Field(i).Type, path[1:])
		}
	}
	return false
}
