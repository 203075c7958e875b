package plugin

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/invopop/jsonschema"

	"github.com/isthmus-mesh/isthmus/internal/conf"
	"github.com/isthmus-mesh/isthmus/translate"
)

// FieldError is an error in one field of a configuration. Field is a dotted
// path, relative to the validated block ("address", "tls.ca_file",
// "ports[0].number"). Reason describes the error and its remedy.
type FieldError = translate.FieldError

// Translate is the translate block of a registry configuration.
type Translate = translate.Options

// Secret is a configuration string that is never shown: it prints and encodes
// as "<secret>". Convert it to string to use it.
type Secret string

const hidden = "<secret>"

// String returns "<secret>", or "" for the empty secret.
func (s Secret) String() string {
	if s == "" {
		return ""
	}
	return hidden
}

// Format writes the same as String, whatever the verb.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, s.String()) }

// LogValue returns the same as String.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// MarshalJSON encodes the same as String.
func (s Secret) MarshalJSON() ([]byte, error) { return json.Marshal(s.String()) }

// MarshalYAML encodes the same as String.
func (s Secret) MarshalYAML() (any, error) { return s.String(), nil }

// UnmarshalJSON decodes a string. Texts that an adapter reports later show the
// secret as "<secret>".
func (s *Secret) UnmarshalJSON(b []byte) error {
	if err := json.Unmarshal(b, (*string)(s)); err != nil {
		return err
	}
	remember(string(*s))
	return nil
}

// JSONSchema describes the secret as a write-only string.
func (Secret) JSONSchema() *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Format: "password", WriteOnly: true}
}

// Duration is a non-negative time.Duration, written as a string in a
// configuration: "5s", "1m30s".
type Duration time.Duration

// String returns the duration as time.Duration prints it.
func (d Duration) String() string { return time.Duration(d).String() }

// Check validates that the duration is zero or from least to most, and returns
// an error as a *[FieldError] of the given field.
func (d Duration) Check(field string, least, most time.Duration) []error {
	if t := time.Duration(d); t != 0 && (t < least || t > most) {
		return []error{&FieldError{Field: field, Reason: fmt.Sprintf("%v is outside %v to %v", d, least, most)}}
	}
	return nil
}

// MarshalJSON encodes the duration as a string.
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(d.String()) }

// UnmarshalJSON decodes a string and rejects other types.
func (d *Duration) UnmarshalJSON(b []byte) error {
	if bytes.Equal(b, []byte("null")) {
		return nil
	}
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return conf.ErrDuration
	}
	v, err := time.ParseDuration(s)
	if err != nil || v < 0 {
		return conf.ErrDuration
	}
	*d = Duration(v)
	return nil
}

// JSONSchema describes the duration as a string.
func (Duration) JSONSchema() *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Pattern: conf.DurationPattern, Examples: []any{"5s", "1m30s"}}
}
