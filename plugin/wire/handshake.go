package wire

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"strconv"
	"strings"
	"time"
)

// serverName is the name in the certificates of both ends.
const serverName = "localhost"

// NewCertificate creates a host's certificate for one plugin, with its PEM form
// for the plugin. The key is on P-256, which every TLS library accepts; gRPC's
// C core, and so Python, rejects the P-521 of go-plugin.
func NewCertificate() (cert tls.Certificate, certPEM []byte, err error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: serverName, Organization: []string{"isthmus"}},
		DNSNames:              []string{serverName},
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
		KeyUsage:              x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		BasicConstraintsValid: true,
		SerialNumber:          big.NewInt(1),
		NotBefore:             time.Now().Add(-time.Minute),
		// A plugin lives as long as its host.
		NotAfter: time.Now().AddDate(30, 0, 0),
		IsCA:     true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}

// Environ returns the environment variables for a plugin: the directory of its
// socket, and the certificate of the host.
func Environ(socketDir string, certPEM []byte) []string {
	return []string{
		CookieKey + "=" + CookieValue,
		"PLUGIN_PROTOCOL_VERSIONS=" + strconv.Itoa(ProtocolVersion),
		"PLUGIN_MIN_PORT=10000",
		"PLUGIN_MAX_PORT=25000",
		"PLUGIN_UNIX_SOCKET_DIR=" + socketDir,
		"PLUGIN_CLIENT_CERT=" + string(certPEM),
	}
}

// Endpoint is the address and certificate of a plugin, from its handshake.
type Endpoint struct {
	// Network and Address are those of its socket.
	Network, Address string
	// Certificate is the certificate that it serves with.
	Certificate *x509.Certificate
}

// maxHandshake bounds how much of the first line is parsed, in bytes. It
// contains a certificate.
const maxHandshake = 8 << 10

// maxQuoted bounds how much of an invalid handshake an error quotes, in bytes.
const maxQuoted = 200

func quote(s string) string {
	if len(s) > maxQuoted {
		s = s[:maxQuoted] + "..."
	}
	return strconv.Quote(s)
}

// ErrVersion reports that a plugin uses another version of the contract.
var ErrVersion = errors.New("the plugin speaks another version of the contract")

// ParseHandshake parses the first line of a plugin's standard output. An error
// quotes a bounded part of it.
func ParseHandshake(line string) (Endpoint, error) {
	e, err := parseHandshake(strings.Split(strings.TrimSpace(line[:min(len(line), maxHandshake)]), "|"))
	if err != nil {
		return Endpoint{}, fmt.Errorf("the first line on its standard output, %s, is not a handshake for this bridge: %w", quote(strings.TrimRight(line, "\r\n")), err)
	}
	return e, nil
}

func parseHandshake(parts []string) (Endpoint, error) {
	switch {
	case len(parts) < 5:
		return Endpoint{}, errors.New(`it must be "1|VERSION|NETWORK|ADDRESS|grpc|CERTIFICATE"; is this an adapter, and built for this machine?`)
	case parts[0] != "1":
		return Endpoint{}, fmt.Errorf("go-plugin's version is %s, must be 1", quote(parts[0]))
	case parts[1] != strconv.Itoa(ProtocolVersion):
		return Endpoint{}, fmt.Errorf("%w: %s, must be %d; use releases of the bridge and the adapter that go together", ErrVersion, quote(parts[1]), ProtocolVersion)
	case parts[2] != "unix" && parts[2] != "tcp":
		return Endpoint{}, fmt.Errorf("the network is %s, must be unix or tcp", quote(parts[2]))
	case parts[4] != "grpc":
		return Endpoint{}, fmt.Errorf("the protocol is %s, must be grpc", quote(parts[4]))
	case len(parts) == 5 || parts[5] == "":
		return Endpoint{}, errors.New("it has no certificate; the plugin must use TLS with the host's certificate in PLUGIN_CLIENT_CERT")
	}
	der, err := base64.RawStdEncoding.DecodeString(parts[5])
	if err != nil {
		return Endpoint{}, fmt.Errorf("the certificate must be base64 without padding: %w", err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return Endpoint{}, fmt.Errorf("the certificate: %w", err)
	}
	return Endpoint{parts[2], parts[3], leaf}, nil
}
