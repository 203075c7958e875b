package wire

import (
	"encoding/base64"
	"errors"
	"strings"
	"testing"
)

// The certificate that a host makes passes for one that a plugin shows, too.
func FuzzParseHandshake(f *testing.F) {
	cert, _, err := NewCertificate()
	if err != nil {
		f.Fatal(err)
	}
	good := "1|1|unix|/tmp/plugin/s|grpc|" + base64.RawStdEncoding.EncodeToString(cert.Certificate[0])
	e, err := ParseHandshake(good + "\n")
	if err != nil || e.Network != "unix" || e.Address != "/tmp/plugin/s" || string(e.Certificate.Raw) != string(cert.Certificate[0]) {
		f.Errorf("ParseHandshake(%q) = %+v, %v", good, e, err)
	}
	if _, err := ParseHandshake(strings.Replace(good, "1|1", "1|7", 1)); !errors.Is(err, ErrVersion) {
		f.Errorf("another version: %v", err)
	}
	for _, line := range []string{good, good + "|true", "", "1|1|unix|x|grpc", "1|1|tcp|127.0.0.1:1|netrpc|", "1|1|unix|x|grpc|====", "1|1|unix|x|" + strings.Repeat("\xff", 5000)} {
		f.Add(line)
	}
	f.Fuzz(func(t *testing.T, line string) {
		e, err := ParseHandshake(line)
		if (err == nil) != (e.Certificate != nil) {
			t.Errorf("%+v, %v", e, err)
		}
		if err != nil && len(err.Error()) > 2*4*maxQuoted+500 { // two parts are repeated, a byte as four
			t.Errorf("an error of %d bytes", len(err.Error()))
		}
	})
}
