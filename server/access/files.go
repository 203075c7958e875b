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

// keys are where the TLS of a listener comes from. They are safe for concurrent
// use.
type keys interface {
	// get returns the configuration in use.
	get() *tls.Config
	// expires returns when the certificate in use ends.
	expires() time.Time
	// fault returns why what is in use is not the newest, nil if it is.
	fault() error
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
	out := tlsConfig(c, pair)
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
	return out, nil
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

// expires returns when the certificate in use ends.
func (f *files) expires() time.Time { return f.get().Certificates[0].Leaf.NotAfter }
