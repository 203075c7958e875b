package access

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/conf"
	"github.com/isthmus-mesh/isthmus/server/config"
)

// watched is a value read from files, and read again when they change. If they
// cannot be used then, the value before stays, unless the error is [gone].
type watched[T any] struct {
	files []string
	read  func(files []string) (T, error)

	mu    sync.Mutex
	value T             // guarded by mu, as the rest
	stamp []fs.FileInfo // of the files when they were read
	err   error         // why value is not that of the files
	count int           // of values
}

// gone is the error of a file that lacks what was read before, as it is missing
// or empty: that is revoked, and the value beside the error is used.
type gone struct{ error }

// Unwrap returns the cause.
func (g gone) Unwrap() error { return g.error }

// watch reads files for the first time.
func watch[T any](files []string, read func([]string) (T, error)) (*watched[T], error) {
	w := &watched[T]{files: files, read: read}
	w.get()
	return w, w.err
}

// get returns the value. It examines the files, which costs a system call for
// each, and reads them if they have changed.
func (w *watched[T]) get() T {
	w.mu.Lock()
	defer w.mu.Unlock()
	now, err := stampOf(w.files)
	if err == nil && slices.EqualFunc(now, w.stamp, same) {
		return w.value
	}
	was := w.err
	value, err := w.read(w.files)
	if w.err = err; err != nil {
		// Files are not renewed in one step, so that the next call tries again.
		w.stamp = nil
		if _, revoked := errors.AsType[gone](err); revoked {
			w.value = value
			if _, before := errors.AsType[gone](was); !before {
				w.count++
			}
		}
		return w.value
	}
	w.value, w.stamp = value, now
	w.count++
	return w.value
}

// generation returns a number that changes with the value.
func (w *watched[T]) generation() int {
	w.get()
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.count
}

// fault returns why the files in use are not those on disk, nil if they are.
func (w *watched[T]) fault() error {
	w.get()
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// maxFile bounds a file of tokens, passwords, authorities, and a kubeconfig.
const maxFile = 4 << 20

// readFile is os.ReadFile with a bound.
func readFile(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(b) > maxFile {
		err = fmt.Errorf("%s is larger than %d MiB, which is the most", name, maxFile>>20)
	}
	return b, err
}

func stampOf(files []string) (stamp []fs.FileInfo, err error) {
	for _, f := range files {
		info, err := os.Stat(f)
		if err != nil {
			return nil, err
		}
		stamp = append(stamp, info)
	}
	return stamp, nil
}

// same reports whether a file was neither replaced nor written.
func same(a, b fs.FileInfo) bool {
	return os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}

// keys are where the TLS of a listener comes from. They are safe for concurrent
// use.
type keys interface {
	// get returns the configuration in use.
	get() *tls.Config
	// valid returns from when until when the certificate in use is valid.
	valid() (from, until time.Time)
	// fault returns why what is in use is not the newest, nil if it is.
	fault() error
	// generation returns a number that changes with the authorities of clients.
	generation() int
	// close ends what renews them.
	close()
}

// newKeys returns the keys of a block. An error is a *[conf.FieldError].
func newKeys(c config.ListenerTLS) (keys, error) {
	if c.WorkloadAPI != "" {
		w, err := newWorkload(c)
		if err != nil {
			return nil, err
		}
		return w, nil
	}
	f, err := newFiles(c)
	if err != nil {
		return nil, err
	}
	return f, nil
}

// files are the TLS files of a listener. The certificate and the authorities
// are renewed apart: one that cannot be used does not keep the other.
type files struct {
	block   config.ListenerTLS
	pair    *watched[*tls.Certificate]
	clients *watched[*authorities] // nil without client_ca_file

	mu   sync.Mutex
	made *tls.Config // guarded by mu, as the rest
	of   *tls.Certificate
	by   *authorities
}

// authorities are those that sign certificates of clients, with what they
// revoked.
type authorities struct {
	pool    *x509.CertPool
	revoked map[string]bool // by issuer and serial number
	due     time.Time       // when the first list has to be renewed
}

func newFiles(c config.ListenerTLS) (*files, error) {
	f := &files{block: c}
	var err error
	if f.pair, err = watch([]string{c.CertFile, c.KeyFile}, func([]string) (*tls.Certificate, error) { return readPair(c) }); err != nil {
		return nil, err
	}
	if c.ClientCAFile == "" {
		return f, nil
	}
	all := []string{c.ClientCAFile}
	if c.ClientCRLFile != "" {
		all = append(all, c.ClientCRLFile)
	}
	f.clients, err = watch(all, func([]string) (*authorities, error) { return readAuthorities(c) })
	if g, ok := errors.AsType[gone](err); ok {
		err = g.error
	}
	if err != nil {
		return nil, err
	}
	return f, nil
}

func (f *files) get() *tls.Config {
	pair, clients := f.pair.get(), (*authorities)(nil)
	if f.clients != nil {
		clients = f.clients.get()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.made == nil || pair != f.of || clients != f.by {
		f.made, f.of, f.by = tlsConfig(f.block, *pair), pair, clients
		if clients != nil {
			f.made.ClientCAs, f.made.VerifyPeerCertificate = clients.pool, clients.verify
		}
	}
	return f.made
}

func (f *files) generation() int {
	if f.clients == nil {
		return 0
	}
	return f.clients.generation()
}

func (f *files) fault() error {
	err := f.pair.fault()
	if f.clients != nil {
		err = errors.Join(err, f.clients.fault())
		if due := f.clients.get().due; !due.IsZero() && time.Now().After(due) {
			err = errors.Join(err, fmt.Errorf("%s was to be renewed by %s; what it revokes stays revoked, and nothing newer is known", f.block.ClientCRLFile, due.Format(time.RFC3339)))
		}
	}
	return err
}

// readPair reads the certificate of a block.
func readPair(c config.ListenerTLS) (*tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(c.CertFile, c.KeyFile)
	if err != nil {
		field := "tls.cert_file"
		if _, missing := os.Stat(c.CertFile); missing == nil {
			if _, missing = os.Stat(c.KeyFile); missing != nil {
				field = "tls.key_file"
			}
		}
		return nil, &conf.FieldError{Field: field, Reason: err.Error()}
	}
	return &pair, nil
}

// readAuthorities reads the authorities of a block and what they revoked.
func readAuthorities(c config.ListenerTLS) (*authorities, error) {
	a := &authorities{pool: x509.NewCertPool(), revoked: make(map[string]bool)}
	bad := func(field, format string, args ...any) error {
		return &conf.FieldError{Field: "tls." + field, Reason: fmt.Sprintf(format, args...)}
	}
	text, err := readFile(c.ClientCAFile)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return a, gone{bad("client_ca_file", "%v", err)}
	case err != nil:
		return nil, bad("client_ca_file", "%v", err)
	case !a.pool.AppendCertsFromPEM(text):
		return a, gone{bad("client_ca_file", "%s holds no PEM certificate", c.ClientCAFile)}
	}
	if c.ClientCRLFile == "" {
		return a, nil
	}
	var certs []*x509.Certificate
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		if cert, err := x509.ParseCertificate(block.Bytes); err == nil {
			certs = append(certs, cert)
		}
	}
	if text, err = readFile(c.ClientCRLFile); err != nil {
		return nil, bad("client_crl_file", "%v", err)
	}
	lists, foreign := 0, error(nil)
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		list, err := x509.ParseRevocationList(block.Bytes)
		if err != nil {
			return nil, bad("client_crl_file", "%s: %v", c.ClientCRLFile, err)
		}
		if !slices.ContainsFunc(certs, func(c *x509.Certificate) bool { return list.CheckSignatureFrom(c) == nil }) {
			foreign = gone{bad("client_crl_file", "%s: no authority of client_ca_file signed the list of %s", c.ClientCRLFile, list.Issuer)}
			continue
		}
		for _, r := range list.RevokedCertificateEntries {
			a.revoked[string(list.RawIssuer)+r.SerialNumber.String()] = true
		}
		if at := list.NextUpdate; !at.IsZero() && (a.due.IsZero() || at.Before(a.due)) {
			a.due = at
		}
		lists++
	}
	if lists == 0 && foreign == nil {
		return nil, bad("client_crl_file", "%s holds no PEM list of revoked certificates", c.ClientCRLFile)
	}
	return a, foreign
}

// verify is [tls.Config.VerifyPeerCertificate]: it refuses a certificate all of
// whose chains have a revoked one.
func (a *authorities) verify(_ [][]byte, chains [][]*x509.Certificate) error {
	if len(chains) == 0 || slices.ContainsFunc(chains, func(chain []*x509.Certificate) bool {
		return !slices.ContainsFunc(chain, func(c *x509.Certificate) bool { return a.revoked[string(c.RawIssuer)+c.SerialNumber.String()] })
	}) {
		return nil // without chains, a client without a certificate
	}
	return errors.New("the certificate of the client is revoked")
}

// verifyClient verifies the certificate of a client as a handshake would now,
// and returns when it ends.
func verifyClient(c *tls.Config, certs []*x509.Certificate) (chains [][]*x509.Certificate, until time.Time, err error) {
	o := x509.VerifyOptions{Roots: c.ClientCAs, Intermediates: x509.NewCertPool(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	var raw [][]byte
	for i, cert := range certs {
		raw = append(raw, cert.Raw)
		if i > 0 {
			o.Intermediates.AddCert(cert)
		}
	}
	if chains, err = certs[0].Verify(o); err == nil && c.VerifyPeerCertificate != nil {
		err = c.VerifyPeerCertificate(raw, chains)
	}
	if err != nil {
		return nil, time.Time{}, err
	}
	return chains, endOf(chains), nil
}

// endOf returns when the last of a certificate's chains ends.
func endOf(chains [][]*x509.Certificate) (until time.Time) {
	for _, chain := range chains {
		end := chain[0].NotAfter
		for _, cert := range chain {
			if cert.NotAfter.Before(end) {
				end = cert.NotAfter
			}
		}
		if end.After(until) {
			until = end
		}
	}
	return until
}

// tlsConfig returns the configuration of a block with a certificate, without
// the authorities of clients.
func tlsConfig(c config.ListenerTLS, pair tls.Certificate) *tls.Config {
	out := &tls.Config{
		Certificates: []tls.Certificate{pair},
		MinVersion:   tls.VersionTLS12,
		NextProtos:   []string{"h2", "http/1.1"},
		// A resumed session would keep the rights of a certificate that the
		// authorities no longer cover.
		SessionTicketsDisabled: c.Verifies(),
	}
	if c.MinVersion == "1.3" {
		out.MinVersion = tls.VersionTLS13
	}
	switch c.ClientAuth {
	case config.ClientAuthRequire:
		out.ClientAuth = tls.RequireAndVerifyClientCert
	case config.ClientAuthRequest:
		out.ClientAuth = tls.VerifyClientCertIfGiven
	}
	return out
}

func (*files) close() {}

func (f *files) valid() (from, until time.Time) {
	leaf := f.pair.get().Leaf
	return leaf.NotBefore, leaf.NotAfter
}
