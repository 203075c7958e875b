package kubernetes

import (
	"iter"
	"maps"
	"time"
)

// State is the state of an object.
type State string

// The states.
const (
	// Written means that the API server has it as it has to be.
	Written State = "written"
	// Pending means that it is to be written or removed.
	Pending State = "pending"
	// Refused means that the API server does not take it.
	Refused State = "refused"
	// Conflict means that there is an object of its name that is not the
	// consumer's.
	Conflict State = "conflict"
	// Left means that it is from before the process began and its service is
	// not there; it stays until every registry has completed a first listing.
	Left State = "left"
)

// States are all of them.
var States = []State{Written, Pending, Refused, Conflict, Left}

// Writes count requests since the process began.
type Writes struct {
	Applied uint64 `json:"applied"`
	Removed uint64 `json:"removed"`
	Failed  uint64 `json:"failed"`
}

// Status is the status of a consumer for pages and the API.
type Status struct {
	Name string `json:"name"`
	// Writes reports that the process holds the lease.
	Writer bool `json:"writer"`
	// Holder is who does, "" while that is not known.
	Holder string `json:"holder,omitempty"`
	// Error is why nothing is written, "" unless that concerns all objects.
	Error string    `json:"error,omitempty"`
	Since time.Time `json:"since,omitzero"` // of Error
	// Waiting reports that registries have not completed a first listing.
	Waiting bool          `json:"waiting"`
	Objects map[State]int `json:"objects"`
	// NotWritten is one of those that are refused or in conflict, the same as
	// long as it is.
	NotWritten *Object `json:"not_written,omitempty"`
	// Without is the number of resources that have no object.
	Without int    `json:"without"`
	Writes  Writes `json:"writes"`
}

// Object is the status of an object, or of a resource that has none.
type Object struct {
	Kind   string    `json:"kind,omitempty"`
	Name   string    `json:"name"` // namespace/name, "" for none
	Entry  string    `json:"entry,omitempty"`
	State  State     `json:"state"`
	Reason string    `json:"reason,omitempty"`
	Since  time.Time `json:"since,omitzero"`
}

// Without is the state of a resource that has no object.
const Without State = "without"

// Status returns the status of the consumer.
func (c *Consumer) Status() Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := Status{
		Name: c.o.Make.consumer(), Writer: c.leading, Holder: c.holder, Waiting: c.waiting,
		Objects: make(map[State]int), Without: c.without, Writes: c.writes,
	}
	for _, state := range States {
		s.Objects[state] = 0
	}
	maps.Copy(s.Objects, c.counts)
	s.Without += c.counts[Without]
	delete(s.Objects, Without)
	if c.first != nil {
		s.NotWritten = new(c.first.status())
	}
	switch {
	case c.held != nil:
		s.Error, s.Since = "the Lease: "+c.held.Error(), c.heldAt
	case c.leading && c.trouble != nil:
		s.Error, s.Since = c.trouble.Error(), c.since
	}
	return s
}

// status describes an object for display.
func (o *object) status() Object {
	item := Object{Kind: o.kind, Name: o.namespace + "/" + o.name, State: o.state, Reason: o.reason, Since: o.since}
	if o.of != nil {
		item.Entry = o.of.record.Name()
	}
	return item
}

// Objects yields the objects, and the resources that have none, in any order.
func (c *Consumer) Objects() iter.Seq[Object] {
	c.mu.Lock()
	all := make([]Object, 0, len(c.objects)+c.without)
	for _, o := range c.objects {
		all = append(all, o.status())
	}
	for _, s := range c.services {
		for name, reason := range s.without {
			all = append(all, Object{Entry: name, State: Without, Reason: reason})
		}
	}
	c.mu.Unlock()
	return func(yield func(Object) bool) {
		for _, o := range all {
			if !yield(o) {
				return
			}
		}
	}
}
