package file

import (
	"errors"
	"fmt"

	"github.com/isthmus-mesh/isthmus/plugin"
)

// Config is the config block of a registry of type file. Missing fields have
// the values of [Defaults].
type Config struct {
	Path      string `json:"path" jsonschema_description:"Directory whose .yaml and .yml files are read, or one file. A relative path is relative to the working directory of the process. Required."`
	Namespace string `json:"namespace,omitempty" jsonschema_description:"Namespace of Istio resources whose metadata names none. Default: default."`
}

// Defaults holds the values of missing fields.
var Defaults = Config{Namespace: "default"}

// Validate returns all errors of c, each as a *[plugin.FieldError]. It does not
// check whether the path exists, as it may be created later.
func (c Config) Validate() error {
	var errs []error
	if c.Path == "" {
		errs = append(errs, &plugin.FieldError{Field: "path", Reason: "is missing; give a directory of YAML files, or one file, such as ./mesh"})
	}
	if c.Namespace != "" && !isDNSLabel(c.Namespace) {
		errs = append(errs, &plugin.FieldError{Field: "namespace", Reason: fmt.Sprintf("%q is not the name of a namespace; use lower-case letters, digits and dashes, 63 at most", c.Namespace)})
	}
	return errors.Join(errs...)
}

// access returns what the adapter needs of its machine.
func (c Config) access() plugin.Access { return plugin.Access{Read: []string{c.Path}} }
