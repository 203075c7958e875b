package plugin

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net"
	"os"
	"path/filepath"
)

// TLS is the TLS configuration of a client.
type TLS struct {
	CAFile             string `json:"ca_file,omitempty" jsonschema_description:"PEM file of the authorities that may sign the servers' certificates, read again for every connection. Default: the system's."`
	CAPath             string `json:"ca_path,omitempty" jsonschema_description:"Folder of such PEM files. Not together with ca_file."`
	CertFile           string `json:"cert_file,omitempty" jsonschema_description:"PEM file of the client's certificate, read again for every connection. Needs key_file."`
	KeyFile            string `json:"key_file,omitempty" jsonschema_description:"PEM file of the client certificate's key."`
	ServerName         string `json:"server_name,omitempty" jsonschema_description:"Name that the servers' certificates must carry. Default: the host of each."`
	InsecureSkipVerify bool   `json:"insecure_skip_verify,omitempty" jsonschema_description:"Do not verify the servers' certificates. For trials only: anyone on the way can then add instances."`
}

// Check validates the block, which is that of the given field, and returns each
// error as a *[FieldError]. It reads no file.
func (t TLS) Check(field string) (errs []error) {
	if (t.CertFile == "") != (t.KeyFile == "") {
		errs = append(errs, &FieldError{Field: field + ".cert_file", Reason: "cert_file and key_file go together; set both or none"})
	}
	if t.CAFile != "" && t.CAPath != "" {
		errs = append(errs, &FieldError{Field: field + ".ca_path", Reason: "ca_file is set too; keep one of them"})
	}
	return errs
}

// Config reads the files and returns a client configuration. Call it per
// connection to use renewed files; the client certificate is read at each
// handshake in any case. An error is a *[FieldError]; field is that of the
// block.
func (t TLS) Config(field string) (*tls.Config, error) {
	c := &tls.Config{
		MinVersion:         tls.VersionTLS12,
		ServerName:         t.ServerName,
		InsecureSkipVerify: t.InsecureSkipVerify, //nolint:gosec // asked for by the operator, whom the schema warns
	}
	bad := func(name string, err error) error {
		return &FieldError{Field: field + "." + name, Reason: err.Error()}
	}
	files := []string{t.CAFile}
	if t.CAPath != "" {
		entries, err := os.ReadDir(t.CAPath)
		if err != nil {
			return nil, bad("ca_path", err)
		}
		files = nil
		for _, e := range entries {
			path := filepath.Join(t.CAPath, e.Name())
			// Mounted secrets contain links, one of them to a directory.
			if info, err := os.Stat(path); err != nil {
				return nil, bad("ca_path", err)
			} else if !info.IsDir() {
				files = append(files, path)
			}
		}
		if len(files) == 0 {
			return nil, bad("ca_path", fmt.Errorf("folder %s has no files", t.CAPath))
		}
	}
	for _, file := range files {
		if file == "" {
			continue
		}
		name := "ca_file"
		if t.CAPath != "" {
			name = "ca_path"
		}
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, bad(name, err)
		}
		if c.RootCAs == nil {
			c.RootCAs = x509.NewCertPool()
		}
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, bad(name, fmt.Errorf("%s holds no PEM certificate", file))
		}
	}
	if t.CertFile != "" {
		load := func() (*tls.Certificate, error) {
			pair, err := tls.LoadX509KeyPair(t.CertFile, t.KeyFile)
			if err != nil {
				return nil, bad("cert_file", err)
			}
			return &pair, nil
		}
		if _, err := load(); err != nil {
			return nil, err
		}
		c.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return load() }
	}
	return c, nil
}

// DialHTTP returns a DialTLSContext for http.Transport that reads the files for
// each connection, and negotiates HTTP/2 if the transport has
// ForceAttemptHTTP2. field is that of the block.
func (t TLS) DialHTTP(field string, d *net.Dialer) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := t.Config(field)
		if err != nil {
			return nil, err
		}
		if c.ServerName == "" {
			if c.ServerName, _, err = net.SplitHostPort(address); err != nil {
				return nil, err
			}
		}
		c.NextProtos = []string{"h2", "http/1.1"}
		return (&tls.Dialer{NetDialer: d, Config: c}).DialContext(ctx, network, address)
	}
}
