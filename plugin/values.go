package plugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/invopop/jsonschema"

	"github.com/isthmus-mesh/isthmus/translate"
)

// FieldError says what is wrong with one field of a configuration. Field is a dotted path; what Validate returns is relative to the
// block it validates ("address", "tls.ca_file", "ports[0].number"). Reason says what is wrong and how to mend it.
type FieldError = translate.FieldError

// Translate is the translate block of a registry's configuration.
type Translate = translate.Options

// Secret is a string of a configuration that is never shown: every way of printing or encoding it gives "<secret>". Convert it
// to string to use it.
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

// JSONSchema describes the secret as a write-only string.
func (Secret) JSONSchema() *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Format: "password", WriteOnly: true}
}

// Duration is a time.Duration that is written as a string in a configuration: "5s", "1m30s". It is not negative.
type Duration time.Duration

// durationPattern is what the schema says of a duration.
const durationPattern = `^(0|([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+)$`

var errDuration = errors.New(`must be a duration such as "5s" or "1m30s"`)

// String returns the duration as time.Duration prints it.
func (d Duration) String() string { return time.Duration(d).String() }

// MarshalJSON encodes the duration as a string.
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(d.String()) }

// UnmarshalJSON decodes a string; nothing else is a duration.
func (d *Duration) UnmarshalJSON(b []byte) error {
	if bytes.Equal(b, []byte("null")) {
		return nil
	}
	var s string
	if err := json.Unmarshal(b, &s); err != nil {
		return errDuration
	}
	v, err := time.ParseDuration(s)
	if err != nil || v < 0 {
		return errDuration
	}
	*d = Duration(v)
	return nil
}

// JSONSchema describes the duration as a string.
func (Duration) JSONSchema() *jsonschema.Schema {
	return &jsonschema.Schema{Type: "string", Pattern: durationPattern, Examples: []any{"5s", "1m30s"}}
}
