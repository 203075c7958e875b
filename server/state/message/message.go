// Package message reads what a plugin sends, without a lock: it decodes, checks
// and hashes resources, which is the expensive part, and finds out whether the
// message breaks the contract.
package message

import (
	"errors"
	"fmt"

	"google.golang.org/protobuf/proto"

	"github.com/isthmus-mesh/isthmus/internal/clip"
	"github.com/isthmus-mesh/isthmus/plugin/collection"
	pluginv1 "github.com/isthmus-mesh/isthmus/plugin/proto/isthmus/plugin/v1"
	"github.com/isthmus-mesh/isthmus/server/encode"
)

// maxNamed bounds a name in an error, in bytes.
const maxNamed = 200

// Upsert is a resource, or the reason why it is refused.
type Upsert struct {
	Service string // its ServiceEntry, of an instance or of a service
	Part    *encode.Part
	Err     error
}

// ID returns the collection and name of the resource, as far as they are
// legible.
func (u *Upsert) ID() (coll, name string) {
	if invalid, ok := errors.AsType[*encode.Invalid](u.Err); ok {
		return invalid.Collection, invalid.Name
	}
	return u.Part.Collection, u.Part.Name
}

// IsNameless reports whether the resource cannot be identified.
func (u *Upsert) IsNameless() bool {
	invalid, ok := errors.AsType[*encode.Invalid](u.Err)
	return ok && invalid.Nameless()
}

// IsInstance reports whether the resource is to be one of a service's
// instances.
func (u *Upsert) IsInstance() bool {
	return u.Err == nil && u.Service != "" && (u.Part.Collection != collection.ServiceEntry || u.Service != u.Part.Name)
}

// Owner decides what a registry may say. Check is safe for concurrent use; an
// error is the reason of the refusal.
type Owner interface {
	Check(p *encode.Part, body proto.Message) error
}

// ForeignError is the refusal of something that is not the registry's.
type ForeignError struct{ error }

// Unwrap returns the reason.
func (e *ForeignError) Unwrap() error { return e.error }

// Reader says how messages are read.
type Reader struct {
	// Valid returns the error with which istiod would reject a resource.
	Valid encode.Check
	// Selector returns the value of [encode.SelectorLabel] for the instances of
	// a service, and the label encoded as a field of a WorkloadEntry.
	Selector func(service string) (value string, label []byte)
}

// Read returns the resources of a message. The hash of an instance includes the
// selector label that is added if it is missing. The owner may be nil.
//
// An error says how the message breaks the contract as such, so that no part of
// it is applied: it names a resource more than once, or both retains a service
// and ends its retention. A resource without a legible collection or name is
// not compared; it is refused, or has no effect.
func (r *Reader) Read(m *pluginv1.WatchResponse, owner Owner) ([]Upsert, error) {
	out := make([]Upsert, len(m.GetUpserts()))
	var service, selector string // of the previous upsert: instances of a service are adjacent
	var label []byte
	checks := []encode.Check{r.Valid}
	if owner != nil {
		checks = append(checks, func(p *encode.Part, body proto.Message) error {
			if err := owner.Check(p, body); err != nil {
				return &ForeignError{err}
			}
			return nil
		})
	}
	for n, u := range m.GetUpserts() {
		to := &out[n]
		to.Service = u.GetService()
		to.Part, to.Err = encode.Parse(u.GetResource(), func(p *encode.Part) []byte {
			if to.Service == "" || p.Collection != collection.WorkloadEntry {
				return nil
			}
			if to.Service != service {
				service = to.Service
				selector, label = r.Selector(service)
			}
			if p.Label(encode.SelectorLabel) == selector {
				return nil
			}
			return label
		}, checks...)
	}
	return out, check(m, out)
}

// check implements Read.
func check(m *pluginv1.WatchResponse, upserts []Upsert) error {
	n := len(upserts) + len(m.GetRemovals()) + len(m.GetKept()) + len(m.GetRelisted())
	if n < 2 {
		return nil
	}
	type id struct{ collection, name string }
	type place struct {
		part string
		n    int
	}
	seen := make(map[id]place, n)
	again := func(coll, name string, at place) error {
		if coll == "" || name == "" {
			return nil
		}
		if was, there := seen[id{coll, name}]; there {
			return fmt.Errorf("%s[%d] and %s[%d] of one message are both %s %q; a message names a resource once: set, removed or kept",
				was.part, was.n, at.part, at.n, clip.Text(coll, maxNamed), clip.Text(name, maxNamed))
		}
		seen[id{coll, name}] = at
		return nil
	}
	for n, rm := range m.GetRemovals() {
		if err := again(rm.GetCollection(), rm.GetName(), place{"removals", n}); err != nil {
			return err
		}
	}
	for n, k := range m.GetKept() {
		if err := again(k.GetCollection(), k.GetName(), place{"kept", n}); err != nil {
			return err
		}
	}
	for n := range upserts {
		coll, name := upserts[n].ID()
		if err := again(coll, name, place{"upserts", n}); err != nil {
			return err
		}
	}
	for n, name := range m.GetRelisted() {
		if at := seen[id{collection.ServiceEntry, name}]; at.part == "kept" {
			return fmt.Errorf("kept[%d] and relisted[%d] of one message are both %q; a service that is relisted is no longer kept", at.n, n, clip.Text(name, maxNamed))
		}
	}
	return nil
}
