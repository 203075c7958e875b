package access

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/isthmus-mesh/isthmus/internal/conf"
	"github.com/isthmus-mesh/isthmus/server/config"
)

// watched is a value read from files, and read again when they change. If they
// cannot be used then, the value before stays.
type watched[T any] struct {
	files []string
	read  func(files []string) (T, error)

	mu    sync.Mutex
	value T             // guarded by mu, as the rest
	stamp []fs.FileInfo // of the files when they were read
	err   error         // why value is not that of the files
}

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
	value, err := w.read(w.files)
	if w.err = err; err != nil {
		// Files are not renewed in one step, so that the next call tries again.
		w.stamp = nil
		return w.value
	}
	w.value, w.stamp = value, now
	return w.value
}

// fault returns why the files in use are not those on disk, nil if they are.
func (w *watched[T]) fault() error {
	w.get()
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
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

// files are the TLS files of a listener.
type files struct{ *watched[*tls.Config] }

func newFiles(c config.ListenerTLS) (*files, error) {
	all := []string{c.CertFile, c.KeyFile}
	if c.ClientCAFile != "" {
		all = append(all, c.ClientCAFile)
	}
	w, err := watch(all, func([]string) (*tls.Config, error) { return serverConfig(c) })
	return &files{w}, err
}

// serverConfig reads the files of a block.
func serverConfig(c config.ListenerTLS) (*tls.Config, error) {
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
	out := &tls.Config{
		Certificates: []tls.Certificate{pair},
		MinVersion:   tls.VersionTLS12,
		NextProtos:   []string{"h2", "http/1.1"},
		// A resumed session would keep the rights of a certificate that
		// client_ca_file no longer covers.
		SessionTicketsDisabled: c.ClientCAFile != "",
	}
	if c.MinVersion == "1.3" {
		out.MinVersion = tls.VersionTLS13
	}
	if c.ClientCAFile == "" {
		return out, nil
	}
	pem, err := os.ReadFile(c.ClientCAFile)
	if err != nil {
		return nil, &conf.FieldError{Field: "tls.client_ca_file", Reason: err.Error()}
	}
	out.ClientCAs = x509.NewCertPool()
	if !out.ClientCAs.AppendCertsFromPEM(pem) {
		return nil, &conf.FieldError{Field: "tls.client_ca_file", Reason: fmt.Sprintf("%s holds no PEM certificate", c.ClientCAFile)}
	}
	switch c.ClientAuth {
	case config.ClientAuthRequire:
		out.ClientAuth = tls.RequireAndVerifyClientCert
	case config.ClientAuthRequest:
		out.ClientAuth = tls.VerifyClientCertIfGiven
	}
	return out, nil
}

// expires returns when the certificate in use ends.
func (f *files) expires() time.Time { return f.get().Certificates[0].Leaf.NotAfter }
