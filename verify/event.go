package verify

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"
)

// Kinds of events.
const (
	// Open is the begin of a stream: Stream, Protocol, Form.
	Open = "open"
	// Request is what the sink sent: Stream, Type, and the fields of a request.
	// One with a Nonce is an ACK, or a NACK if Refused is set.
	Request = "request"
	// Response is what the sink received: Stream, Type, and the fields of a
	// response.
	Response = "response"
	// End is the end of a stream.
	End = "end"
	// Truth is a change in a registry: Collection, Name, and either Absent or
	// Revision. It is recorded before the change is made.
	Truth = "truth"
	// Start is the start of a bridge. What a registry has had since Since, or
	// since the event if that is zero, is in the first response of each stream.
	Start = "start"
	// Settled says that the registries can be followed and have not changed for
	// so long that every open stream has what they have; with Names, in these
	// namespaces only.
	Settled = "settled"
)

// Event is one line of a recording. Fields that a kind does not have are zero.
type Event struct {
	Time   time.Time `json:"time"`
	Kind   string    `json:"event"`
	Stream int       `json:"stream,omitempty"` // from 1

	// Of Open: the protocol, "sotw", "delta" or "mcp"; the shape that the sink
	// selects, "inline" or "workload", or "" for the default of the protocol;
	// a name for what else decides the bytes of a resource, such as the
	// profile; and the namespaces that the stream's view has, none is all.
	// Streams equal in all of these receive the same bytes.
	Protocol   string   `json:"protocol,omitempty"`
	Shape      string   `json:"shape,omitempty"`
	Form       string   `json:"form,omitempty"`
	Namespaces []string `json:"namespaces,omitempty"`

	// Of Request and Response: the type URL, or the collection of the legacy
	// protocol.
	Type  string `json:"type,omitempty"`
	Nonce string `json:"nonce,omitempty"`

	// Of Request: why the response is refused, the versions that the sink holds
	// when it subscribes, the names that it subscribes to, and those that it no
	// longer subscribes to. Without names in the first request it is all.
	Refused  string            `json:"refused,omitempty"`
	Versions map[string]string `json:"versions,omitempty"`
	Names    []string          `json:"names,omitempty"`
	Dropped  []string          `json:"dropped,omitempty"`

	// Of Response: the version, whether it states changes only, and what is in
	// it.
	Version     string     `json:"version,omitempty"`
	Incremental bool       `json:"incremental,omitempty"`
	Resources   []Resource `json:"resources,omitempty"`
	Removed     []string   `json:"removed,omitempty"`

	// Of End.
	Reason string `json:"reason,omitempty"`

	// Of Truth. Revision numbers the changes of all registries, from 1. An
	// instance has the name of its WorkloadEntry; Service is the name of its
	// ServiceEntry, and Address its endpoint in it as [Endpoint] writes it.
	Collection string `json:"collection,omitempty"`
	Name       string `json:"name,omitempty"`
	Service    string `json:"service,omitempty"`
	Address    string `json:"address,omitempty"`
	Revision   uint64 `json:"revision,omitempty"`
	Absent     bool   `json:"absent,omitempty"`

	// Of Start.
	Since time.Time `json:"since,omitzero"`
}

// Resource is one resource of a response.
type Resource struct {
	Name    string `json:"name"`
	Version string `json:"version,omitempty"`
	// Sum is a hash of the bytes of the resource, Content one of what it says
	// without its version.
	Sum     string `json:"sum"`
	Content string `json:"content"`
	// Revision is the number in the label [RevisionLabel], 0 without it.
	Revision uint64 `json:"revision,omitempty"`
	// Endpoints are those of a ServiceEntry.
	Endpoints []Endpoint `json:"endpoints,omitempty"`
	// Invalid says why the resource is not what the protocol requires.
	Invalid string `json:"invalid,omitempty"`
}

// Endpoint is one endpoint of a ServiceEntry.
type Endpoint struct {
	// Address is the address, with the numbers of its ports if it has any:
	// 10.0.0.1:8080,8081.
	Address  string `json:"address"`
	Revision uint64 `json:"revision,omitempty"`
}

// Read calls f with each event of a recording and its number, from 1. It stops
// at the first error.
func Read(r io.Reader, f func(n int, e *Event) error) error {
	dec := json.NewDecoder(r)
	dec.DisallowUnknownFields()
	for n := 1; ; n++ {
		e := new(Event)
		if err := dec.Decode(e); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("event %d: %w", n, err)
		}
		if err := f(n, e); err != nil {
			return err
		}
	}
}

// Append appends the line of an event.
func (e *Event) Append(b []byte) ([]byte, error) {
	line, err := json.Marshal(e)
	if err != nil {
		return b, err
	}
	return append(append(b, line...), '\n'), nil
}
