package supervisor

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"aead.dev/minisign"

	"github.com/isthmus-mesh/isthmus/internal/clip"
)

// passed are the variables of the bridge's environment that every plugin gets:
// where it finds programs, temporary files, time zone and authorities of
// certificates, how it reaches servers, and how Go's runtime behaves. Any other
// one may hold a secret and has to be named.
var passed = []string{
	"PATH", "HOME", "USER", "TMPDIR", "TZ", "ZONEINFO", "LANG", "LC_ALL", "LC_CTYPE",
	"SSL_CERT_FILE", "SSL_CERT_DIR",
	"HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy",
	"LOCALDOMAIN", "RES_OPTIONS", "HOSTALIASES",
	"GODEBUG", "GOGC", "GOMEMLIMIT", "GOMAXPROCS", "GORACE",
}

// environ returns the part of the bridge's environment that a plugin gets.
func environ(names []string) (out []string) {
	for _, v := range os.Environ() {
		name, _, _ := strings.Cut(v, "=")
		if slices.Contains(passed, name) || slices.Contains(names, name) {
			out = append(out, v)
		}
	}
	return out
}

// credential returns the user that the plugin's process is to run as, nil for
// the bridge's own: if none is configured, or only root could change it.
func credential(name string) (*syscall.Credential, error) {
	if name == "" || os.Geteuid() != 0 {
		return nil, nil
	}
	u, err := user.Lookup(name)
	if err != nil {
		u, err = user.LookupId(name)
	}
	if err != nil {
		return nil, fmt.Errorf("plugin.user: there is no user %q on this machine", name)
	}
	uid, uerr := strconv.ParseUint(u.Uid, 10, 32)
	gid, gerr := strconv.ParseUint(u.Gid, 10, 32)
	if err := errors.Join(uerr, gerr); err != nil {
		return nil, fmt.Errorf("plugin.user: %q: %w", name, err)
	}
	return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil // no further groups
}

// give lets the user of a plugin make its socket.
func (c *client) give(cred *syscall.Credential) error {
	if cred == nil {
		return nil
	}
	// The directory of the host may be passed through, and not listed.
	return errors.Join(os.Chmod(c.process.host.dir, 0o711), os.Chown(c.dir, int(cred.Uid), int(cred.Gid)))
}

// SignatureSuffix is added to the name of an executable for that of the file
// with its signature.
const SignatureSuffix = ".minisig"

// verifySignature checks the executable's signature.
func verifySignature(spec Spec) error {
	if spec.PublicKey == "" {
		return nil
	}
	key, err := spec.key()
	if err != nil {
		return err
	}
	path, err := exec.LookPath(spec.Command[0])
	if err != nil {
		return err
	}
	signature, err := os.ReadFile(path + SignatureSuffix)
	if err != nil {
		return fmt.Errorf("%s: %w: %w", path, ErrSignature, err)
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	r := minisign.NewReader(f)
	if _, err := io.Copy(io.Discard, r); err != nil {
		return fmt.Errorf("signature of %s: %w", path, err)
	}
	if !r.Verify(key, signature) {
		return fmt.Errorf("%s: %w; if the file was changed on purpose, sign it: minisign -S -m %s", path, ErrSignature, path)
	}
	return nil
}

// maxPhrases bounds what a plugin says of its confinement.
const maxPhrases, maxPhrase = 10, 1000

// inForce describes the rights of the process, for display.
func (c *client) inForce(spec Spec) []string {
	if c.process == nil { // see Spec.Open
		return nil
	}
	out := inForce(c.process.pid)
	switch {
	case spec.Unconfined:
		out = append(out, "not confined: plugin.confine is false")
	case len(c.confinement) == 0:
		out = append(out, "not confined: the adapter does not do that")
	}
	for _, phrase := range c.confinement[:min(len(c.confinement), maxPhrases)] {
		out = append(out, clip.Text(phrase, maxPhrase))
	}
	return out
}
