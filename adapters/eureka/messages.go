package eureka

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"
)

// application is one application of an answer.
type application struct {
	Name      string
	Instances []instance
}

// instance is one instance in a server's JSON. Some versions encode numbers as
// strings, and a list of one element as that element.
type instance struct {
	InstanceID       text            `json:"instanceId"`
	HostName         text            `json:"hostName"`
	IPAddr           text            `json:"ipAddr"`
	Status           text            `json:"status"`
	Port             port            `json:"port"`
	SecurePort       port            `json:"securePort"`
	VIPAddress       text            `json:"vipAddress"`
	SecureVIPAddress text            `json:"secureVipAddress"`
	ASGName          text            `json:"asgName"`
	Metadata         map[string]text `json:"metadata"`
	ActionType       text            `json:"actionType"`
	DataCenterInfo   struct {
		Name     text            `json:"name"`
		Metadata map[string]text `json:"metadata"`
	} `json:"dataCenterInfo"`
}

// text decodes a string as itself, null as "", and any other value as its JSON.
type text string

// UnmarshalJSON implements json.Unmarshaler.
func (t *text) UnmarshalJSON(b []byte) error {
	switch {
	case bytes.Equal(b, []byte("null")):
		*t = ""
	case len(b) > 1 && b[0] == '"' && bytes.IndexByte(b, '\\') < 0 && utf8.Valid(b):
		*t = text(b[1 : len(b)-1]) // the common case
	case len(b) > 0 && b[0] == '"':
		var s string
		if err := json.Unmarshal(b, &s); err != nil {
			return err
		}
		*t = text(s)
	default:
		*t = text(b)
	}
	return nil
}

// plainPort matches a port as current servers encode it.
var plainPort = regexp.MustCompile(`^\{"\$":([0-9]{1,9}),"@enabled":"(true|false)"\}$`)

// port is {"$": 8080, "@enabled": "true"}.
type port struct {
	number  int
	enabled bool
}

// UnmarshalJSON implements json.Unmarshaler. A value that is not a number
// becomes 0, which translate reports as an invalid port.
func (p *port) UnmarshalJSON(b []byte) error {
	if m := plainPort.FindSubmatch(b); m != nil { // the common case
		n, _ := strconv.Atoi(string(m[1])) // digits only; 0 on overflow
		*p = port{n, len(m[2]) == len("true")}
		return nil
	}
	var v struct {
		Number  text `json:"$"`
		Enabled text `json:"@enabled"`
	}
	if len(b) > 0 && b[0] == '{' {
		if err := json.Unmarshal(b, &v); err != nil {
			return err
		}
	} else if !bytes.Equal(b, []byte("null")) {
		if err := json.Unmarshal(b, &v.Number); err != nil {
			return err
		}
		v.Enabled = "true"
	}
	n, err := strconv.Atoi(string(v.Number))
	if err != nil {
		n = 0
	}
	*p = port{n, strings.EqualFold(string(v.Enabled), "true")}
	return nil
}

// errNoAnswer reports an answer that is not an application list.
var errNoAnswer = errors.New("the answer is not a list of applications; does the URL end with the path of the API, such as /eureka?")

// readApplications decodes an answer to /apps or /apps/delta as a stream, and
// passes each application to take, which must not retain it. It returns the
// answer's hash code. take may have been called before an error is returned.
func readApplications(r io.Reader, take func(*application)) (hash string, err error) {
	d := json.NewDecoder(r)
	found, stated := false, false
	err = object(d, func(name string) error {
		if name != "applications" {
			return skip(d)
		}
		found = true
		return object(d, func(name string) error {
			switch name {
			case "apps__hashcode":
				var t text
				stated = true
				err := d.Decode(&t)
				hash = string(t)
				return err
			case "application":
				return applications(d, take)
			default:
				return skip(d)
			}
		})
	})
	if err == nil && (!found || !stated) {
		err = errNoAnswer
	}
	if err != nil {
		return "", fmt.Errorf("read the list of applications: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return "", errors.New("read the list of applications: the answer goes on after it, or is cut off")
	}
	return hash, nil
}

// object decodes an object. It calls member with the name of each member;
// member decodes the value.
func object(d *json.Decoder, member func(name string) error) error {
	if t, err := d.Token(); err != nil {
		return noEOF(err)
	} else if t != json.Delim('{') {
		return errNoAnswer
	}
	return members(d, member)
}

// members decodes the rest of an object after its opening brace.
func members(d *json.Decoder, member func(name string) error) error {
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return noEOF(err)
		}
		name, ok := t.(string)
		if !ok {
			return errNoAnswer
		}
		if err := member(name); err != nil {
			return noEOF(err)
		}
	}
	_, err := d.Token() // the brace
	return noEOF(err)
}

// noEOF converts io.EOF inside an answer to an error.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func skip(d *json.Decoder) error {
	var v json.RawMessage
	return d.Decode(&v)
}

// applications decodes a list of applications, or a single one.
func applications(d *json.Decoder, take func(*application)) error {
	t, err := d.Token()
	if err != nil {
		return noEOF(err)
	}
	one := func() error {
		var a application
		err := members(d, func(name string) error {
			switch name {
			case "name":
				var t text
				err := d.Decode(&t)
				a.Name = string(t)
				return err
			case "instance":
				var err error
				a.Instances, err = instances(d)
				return err
			default:
				return skip(d)
			}
		})
		if err == nil && a.Name == "" {
			err = errors.New("an application has no name")
		}
		if err == nil {
			take(&a)
		}
		return err
	}
	switch t {
	case nil:
		return nil
	case json.Delim('{'):
		return one()
	case json.Delim('['):
	default:
		return errNoAnswer
	}
	for d.More() {
		if t, err := d.Token(); err != nil {
			return noEOF(err)
		} else if t != json.Delim('{') {
			return errNoAnswer
		}
		if err := one(); err != nil {
			return err
		}
	}
	_, err = d.Token() // the bracket
	return noEOF(err)
}

// instances decodes a list of instances, or a single one.
func instances(d *json.Decoder) (all []instance, err error) {
	t, err := d.Token()
	if err != nil {
		return nil, noEOF(err)
	}
	switch t {
	case nil:
		return nil, nil
	case json.Delim('['):
		for d.More() {
			all = append(all, instance{})
			if err := d.Decode(&all[len(all)-1]); err != nil {
				return nil, noEOF(err)
			}
		}
		_, err = d.Token() // the bracket
		return all, noEOF(err)
	case json.Delim('{'):
		fields := map[string]json.RawMessage{}
		err := members(d, func(name string) error {
			var v json.RawMessage
			err := d.Decode(&v)
			fields[name] = v
			return err
		})
		if err != nil {
			return nil, err
		}
		b, err := json.Marshal(fields)
		if err != nil {
			return nil, err
		}
		all = make([]instance, 1)
		return all, json.Unmarshal(b, &all[0])
	default:
		return nil, errNoAnswer
	}
}
