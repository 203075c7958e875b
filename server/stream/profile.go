package stream

import (
	"fmt"
	"slices"
	"strings"

	"github.com/isthmus-mesh/isthmus/server/encode"
)

// Profile describes a range of sink versions.
type Profile struct {
	// Name is the profile's name in configuration, metrics and the admin page.
	Name string
	// Versions names these versions for people.
	Versions string
	// Form is the encoding of resources. A delta sink of xDS gets the same
	// workarounds in the workload shape. In MCP the shape is always inline:
	// Pilots handle WorkloadEntries only at their start.
	Form encode.Form
	// Limit is the size in bytes of the largest response that these sinks
	// accept, 0 for none; xDS only. A larger one makes the sink disconnect,
	// reconnect, and receive it again.
	Limit int
	// Barrier holds one collection until the ServiceEntries are acknowledged;
	// MCP only.
	Barrier bool
	// Why explains the profile in a sentence.
	Why string

	// Collections are all that these sinks request, sorted; nil if that varies,
	// and in xDS.
	Collections []string
	// ID is the node id of these sinks; most have none. MCP only.
	ID string
}

// Profiles is the table of a protocol, oldest sinks first.
type Profiles []*Profile

// Names returns the names of all profiles.
func (t Profiles) Names() []string {
	names := make([]string, len(t))
	for i, p := range t {
		names[i] = p.Name
	}
	return names
}

// Find returns the profile with a name.
func (t Profiles) Find(name string) (*Profile, error) {
	i := slices.IndexFunc(t, func(p *Profile) bool { return p.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("profile %q: there is no such profile; there are %s", name, strings.Join(t.Names(), ", "))
	}
	return t[i], nil
}

// Must is [Profiles.Find] for a name that there is.
func (t Profiles) Must(name string) *Profile {
	p, err := t.Find(name)
	if err != nil {
		panic("BUG: " + err.Error())
	}
	return p
}
