package exec

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"

	"github.com/isthmus-mesh/isthmus/plugin"
	"github.com/isthmus-mesh/isthmus/plugin/registry"
)

// message is the content of a line. It has one of its fields, or none.
type message struct {
	// services are the services of a line; whole reports that there are no
	// others. bad are those that cannot be used.
	services []plugin.Snapshot
	bad      []finding
	whole    bool

	remove   *registry.Key
	synced   bool
	degraded *string
	detail   *string
	problem  *finding
}

// finding is a problem: a reason under an id.
type finding struct{ id, reason string }

// lineID is the id of what is wrong with a line that names no service.
const lineID = "line"

// The words of a line. docs/registries/exec.schema.json describes them.
type (
	keyWords struct {
		Name       string `json:"name"`
		Group      string `json:"group"`
		Namespace  string `json:"namespace"`
		Partition  string `json:"partition"`
		Datacenter string `json:"datacenter"`
	}
	serviceWords struct {
		Name       string           `json:"name"`
		Group      string           `json:"group"`
		Namespace  string           `json:"namespace"`
		Partition  string           `json:"partition"`
		Datacenter string           `json:"datacenter"`
		Ports      []portWords      `json:"ports"`
		Meta       map[string]text  `json:"meta"`
		Tags       []string         `json:"tags"`
		Instances  *[]instanceWords `json:"instances"`
		Endpoints  *[]instanceWords `json:"endpoints"` // the same, as the adapter static says
	}
	instanceWords struct {
		ID       string          `json:"id"`
		Address  string          `json:"address"`
		Port     *int            `json:"port"`
		Ports    []portWords     `json:"ports"`
		Meta     map[string]text `json:"meta"`
		Tags     []string        `json:"tags"`
		Weight   *float64        `json:"weight"`
		Health   string          `json:"health"`
		Check    string          `json:"check"`
		Disabled bool            `json:"disabled"`
		Locality string          `json:"locality"`
		Cluster  string          `json:"cluster"`
		Node     string          `json:"node"`
	}
	portWords struct {
		Name     string `json:"name"`
		Number   *int   `json:"number"`
		Protocol string `json:"protocol"`
	}
	problemWords struct {
		ID     string `json:"id"`
		Reason string `json:"reason"`
	}
)

// text is a text, or a number or boolean as it is written.
type text string

// UnmarshalJSON implements json.Unmarshaler.
func (t *text) UnmarshalJSON(b []byte) error {
	switch {
	case b[0] == '"':
		return json.Unmarshal(b, (*string)(t))
	case b[0] == '{' || b[0] == '[' || string(b) == "null":
		return errors.New("a value of meta must be a text, a number, true or false")
	}
	*t = text(b)
	return nil
}

// UnmarshalJSON takes a bare number for a port without a name.
func (p *portWords) UnmarshalJSON(b []byte) error {
	if b[0] != '{' {
		if err := json.Unmarshal(b, &p.Number); err != nil || p.Number == nil {
			return errors.New("a port must be a number, or an object with a number")
		}
		return nil
	}
	type plain portWords
	return decode(b, (*plain)(p))
}

// decode decodes one JSON value strictly. Its errors are in the words of JSON.
func decode(b []byte, into any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	err := d.Decode(into)
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		at := "it"
		if wrong.Field != "" {
			at = wrong.Field
		}
		return fmt.Errorf("%s cannot be a JSON %s", at, wrong.Value)
	}
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return errors.New("the JSON ends too early; an object is on one line, as `jq -c` writes it")
	case err != nil:
		return errors.New(strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is more behind the object; a line holds one")
	}
	return nil
}

// parse reads a line that is not blank. An empty object says nothing.
func parse(line []byte) (m message, err error) {
	if line = bytes.TrimSpace(line); len(line) == 0 || line[0] != '{' {
		return m, errors.New("it is not a JSON object")
	}
	var said map[string]json.RawMessage
	if err := decode(line, &said); err != nil {
		return m, err
	}
	if len(said) > 1 {
		return m, fmt.Errorf("a line says one thing: %s", things)
	}
	for what, raw := range said { // at most one
		if string(raw) == "null" {
			return m, fmt.Errorf("%s is null", what)
		}
		err = m.say(what, raw)
	}
	if err != nil {
		return message{}, err
	}
	return m, nil
}

const things = "service, services, remove, synced, degraded, detail or problem"

// say reads what a line says.
func (m *message) say(what string, raw json.RawMessage) error {
	of := func(err error) error {
		if err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		return nil
	}
	switch what {
	case "service":
		if f := m.add(raw); f != nil && f.id == lineID {
			return of(errors.New(f.reason))
		}
		return nil
	case "services":
		var all []json.RawMessage
		if err := decode(raw, &all); err != nil {
			return of(err)
		}
		m.whole = true
		for _, raw := range all {
			m.add(raw)
		}
		return nil
	case "remove":
		var k keyWords
		if err := decode(raw, &k); err != nil {
			return of(err)
		}
		if k.Name == "" {
			return of(errors.New("the service has no name"))
		}
		m.remove = new(k.key())
		return nil
	case "synced":
		err := decode(raw, &m.synced)
		if err == nil && !m.synced {
			err = errors.New("it must be true")
		}
		return of(err)
	case "degraded":
		return of(decode(raw, &m.degraded))
	case "detail":
		return of(decode(raw, &m.detail))
	case "problem":
		var p problemWords
		err := decode(raw, &p)
		if err == nil && p.ID == "" {
			err = errors.New("it has no id")
		}
		m.problem = &finding{p.ID, p.Reason}
		return of(err)
	default:
		return fmt.Errorf("%.100q is unknown; a line says %s", what, things)
	}
}

// add adds a service, or what is wrong with it.
func (m *message) add(raw json.RawMessage) *finding {
	var w serviceWords
	err := decode(raw, &w)
	if err == nil {
		var s plugin.Snapshot
		if s, err = w.snapshot(); err == nil {
			m.services = append(m.services, s)
			return nil
		}
	}
	f := finding{lineID, err.Error()}
	var k keyWords
	if json.Unmarshal(raw, &k) == nil && k.Name != "" {
		f.id = serviceID(k.key())
	}
	m.bad = append(m.bad, f)
	return &f
}

// serviceID is the id of what is wrong with a service.
func serviceID(key registry.Key) string { return "service " + key.String() }

func (k keyWords) key() registry.Key {
	return registry.Key{Name: k.Name, Group: k.Group, Namespace: k.Namespace, Partition: k.Partition, Datacenter: k.Datacenter}
}

// snapshot converts a service.
func (w *serviceWords) snapshot() (s plugin.Snapshot, err error) {
	key := keyWords{w.Name, w.Group, w.Namespace, w.Partition, w.Datacenter}.key()
	s.Service = registry.Service{Key: key, Meta: texts(w.Meta), Tags: w.Tags}
	all, word := w.Instances, "instances"
	if all == nil {
		all, word = w.Endpoints, "endpoints"
	}
	switch {
	case key.Name == "":
		return s, errors.New("the service has no name")
	case w.Instances != nil && w.Endpoints != nil:
		return s, errors.New("a service has instances or endpoints, not both: they are the same")
	case all == nil:
		return s, errors.New("the service has no instances; write [] if there are none")
	}
	if s.Service.Ports, err = ports(w.Ports); err != nil {
		return s, err
	}
	ids := make(map[string]bool, len(*all))
	s.Instances = make([]registry.Instance, 0, len(*all))
	for i := range *all {
		in, err := (*all)[i].instance(s.Service.Ports)
		if err != nil {
			return s, fmt.Errorf("%s[%d]: %w", word, i, err)
		}
		if ids[in.ID] {
			return s, fmt.Errorf("%s[%d]: the id %q is there twice; give each instance an id of its own", word, i, in.ID)
		}
		ids[in.ID] = true
		s.Instances = append(s.Instances, in)
	}
	return s, nil
}

var healths = map[string]registry.Health{
	"": registry.HealthUnknown, "unknown": registry.HealthUnknown,
	"passing": registry.HealthPassing, "warning": registry.HealthWarning, "critical": registry.HealthCritical,
}

// instance converts an instance of a service with the given ports.
func (w *instanceWords) instance(of []registry.Port) (in registry.Instance, err error) {
	in = registry.Instance{
		ID: w.ID, Address: w.Address, Meta: texts(w.Meta), Tags: w.Tags, Weight: w.Weight,
		Check: w.Check, Disabled: w.Disabled, Cluster: w.Cluster, Node: w.Node,
	}
	var known bool
	if in.Health, known = healths[w.Health]; !known {
		return in, fmt.Errorf("health must be passing, warning, critical or unknown, not %q", w.Health)
	}
	parts := strings.Split(w.Locality, "/")
	if len(parts) > 3 || w.Locality != "" && parts[0] == "" {
		return in, fmt.Errorf("locality must be region, region/zone or region/zone/subzone, not %q", w.Locality)
	}
	parts = append(parts, "", "")
	in.Locality = registry.Locality{Region: parts[0], Zone: parts[1], SubZone: parts[2]}
	if w.Weight != nil && !(*w.Weight >= 0) {
		return in, fmt.Errorf("weight must be 0 or more, not %v", *w.Weight)
	}
	switch {
	case w.Port != nil && w.Ports != nil:
		return in, errors.New("an instance has port or ports, not both")
	case w.Port != nil:
		in.Ports = []registry.Port{{Number: *w.Port}}
		if len(of) == 1 { // with a single port its name may be omitted
			in.Ports[0].Name, in.Ports[0].Protocol = of[0].Name, of[0].Protocol
		}
	case w.Ports != nil:
		if in.Ports, err = ports(w.Ports); err != nil {
			return in, err
		}
	default:
		in.Ports = of
	}
	switch {
	case in.ID != "":
	case in.Address == "" || len(in.Ports) == 0:
		return in, errors.New("an instance without an id needs an address and a port, of which the id is made")
	default:
		in.ID = net.JoinHostPort(in.Address, strconv.Itoa(in.Ports[0].Number))
	}
	return in, nil
}

func ports(words []portWords) ([]registry.Port, error) {
	var out []registry.Port
	names := make(map[string]bool, len(words))
	for i, w := range words {
		switch {
		case w.Number == nil:
			return nil, fmt.Errorf("ports[%d] has no number", i)
		case names[w.Name]:
			return nil, fmt.Errorf("ports[%d]: the name %q is there twice; give each port a name of its own", i, w.Name)
		}
		names[w.Name] = true
		out = append(out, registry.Port{Name: w.Name, Number: *w.Number, Protocol: w.Protocol})
	}
	return out, nil
}

func texts(words map[string]text) map[string]string {
	if words == nil {
		return nil
	}
	out := make(map[string]string, len(words))
	for k, v := range words {
		out[k] = string(v)
	}
	return out
}
